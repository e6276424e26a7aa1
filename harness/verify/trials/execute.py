"""Run compositions on the ranks of this process group, one after the other, and write the outcome of each to a folder.

An outcome is the curves of the composition, or why it was refused. After an error the ranks end, because its remains
might spoil the next composition.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from harness.atomic import replace_text
from harness.checkpoint.directories import EVALUATIONS, METRICS
from harness.composition import Trainer
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError
from harness.topology.agreement import all_gather_object
from harness.training.callbacks import TrainerCallback, TrainerControl, TrainerState
from harness.training.recording.recorder import SAMPLES
from harness.verify.trials.composition import Composition, Execution
from harness.verify.trials.launch import LINES
from harness.verify.trials.subject import Subject, arguments, make_subject

EXPORTED = "exported"
NEVER = 1000  # steps between saves, so none comes; but with saves a run checks its optimizer before the first step


class Refused(UserError):
    """A composition that is refused before its first step."""


def run_lines_unverified(folder: Path, first: int = 0) -> None:
    """Do what `run_lines` does, but compare no tiny copies first: for compositions whose plan is known to be right."""
    run_lines(folder, first, verify_plan="off")


def run_lines(folder: Path, first: int = 0, verify_plan: str = "auto") -> None:
    """Run the compositions of a folder from number `first` on, as a `launch.Worker`. Raises the first error."""
    silence_this_process()
    for number, line in enumerate((folder / LINES).read_text().splitlines()):
        if number < first:
            continue
        composition = Composition.parse(line)
        run_folder = folder / str(number)
        subject = make_subject(composition, folder / "models")
        refusal = ""
        try:
            run_composition(composition, subject, run_folder, verify_plan)
        except Refused as refused:
            refusal = str(refused)
        said = all_gather_object(refusal)
        if dist.get_rank() == 0:
            replace_text(folder / f"{number}.json", json.dumps(outcome_of(said, run_folder)) + "\n")


def silence_this_process() -> None:
    """Switch off all log messages and warnings of this process: nobody reads them."""
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def outcome_of(refusals: list[str], run_folder: Path) -> JsonObject:
    """Return the outcome of a composition; `refusals` has the reason of each rank that refused it, or "" for none."""
    if all(refusals):
        return {"refused": refusals[0]}
    if reason := next(filter(None, refusals), None):
        return {"error": f"on some ranks: {reason}"}
    return {
        "steps": _rows(run_folder / METRICS),
        "evaluations": _rows(run_folder / EVALUATIONS),
        "texts": [row["text"] for row in _rows(run_folder / SAMPLES)],
    }


def _rows(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_composition(composition: Composition, subject: Subject, run_folder: Path, verify_plan: str = "auto") -> None:
    """Train by each execution of the composition in turn; write the trained model to `run_folder/exported`."""
    each = -(-composition.training.steps // len(composition.executions))
    for index, execution in enumerate(composition.executions):
        trainer = new_trainer(composition, execution, subject, run_folder, resumes=index > 0, verify_plan=verify_plan)
        last = index + 1 == len(composition.executions)
        trainer.add_callback(StopAt(composition.training.steps if last else each * (index + 1), saves=not last))
        trainer.train()
        if last:
            trainer.save_model(run_folder / EXPORTED)
        trainer.close()


class StopAt(TrainerCallback):
    """Ends a run after a step, with a checkpoint if another run goes on from it."""

    def __init__(self, step: int, *, saves: bool) -> None:
        self.step = step
        self.saves = saves

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:  # noqa: ARG002
        """Request the end of training after that step."""
        if state.global_step == self.step:
            control.should_save = self.saves
            control.should_training_stop = True


def new_trainer(
    composition: Composition,
    execution: Execution,
    subject: Subject,
    run_folder: Path,
    *,
    resumes: bool = False,
    verify_plan: str = "auto",
) -> Trainer:
    """Return a Trainer for one execution; all ranks call it. Raises Refused if the run is refused."""
    nowhere = io.StringIO()
    training = composition.training
    try:
        prompts = run_folder / "prompts.txt" if subject.prompts else None
        if prompts is not None and dist.get_rank() == 0:
            run_folder.mkdir(parents=True, exist_ok=True)
            prompts.write_text("".join(f"{prompt}\n" for prompt in subject.prompts))
        dist.barrier()
        given = arguments(training, execution, run_folder, prompts)
        given.resume_from_checkpoint = "auto" if resumes else None
        given.verify_plan = verify_plan
        given.save_steps = 0 if execution is composition.executions[-1] else NEVER
        return Trainer(
            _model(subject),
            given,
            train_dataset=subject.trained(),
            eval_dataset=subject.evaluated() if training.evaluate else None,
            processing_class=ByteTokenizer() if subject.prompts else None,
            console=Console(out=nowhere, error=nowhere, speaks=False),
        )
    except UserError as error:
        raise Refused(str(error)) from error


def _model(subject: Subject) -> str | PreTrainedModel:
    if subject.adapters is None:
        return str(subject.base)
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(subject.base, dtype=torch.float32, local_files_only=True)
    return cast(PreTrainedModel, PeftModel.from_pretrained(base, subject.adapters, is_trainable=True))
