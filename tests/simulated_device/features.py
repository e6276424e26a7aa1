"""Runs with what a run can do besides a layout: one function for ranks of the simulated device and for one process of a
CPU, whose numbers are the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedModel

from harness import Trainer, TrainerCallback
from harness.batches.order import SeveralSources
from harness.data.tokenizer import ByteTokenizer
from harness.parallel.generators import default_generator
from tests.support.ranks import here
from tests.support.simulated_device import device
from tests.support.simulated_device.kernels import CALLED, stand_ins
from tests.support.training import Job, arguments_of, logged, rows

STEPS = 3  # of a run that does not say how many: the first whose update comes from moments of two steps
TEXT = "Sphinx of black quartz, judge my vow; 0123456789 + 9876543210. " * 8


@dataclass(frozen=True)
class Run:
    """A run of some steps.

    Attributes:
        settings: of the harness, besides those of the job.
        exports: whether it writes the model at its end.
        in_memory: whether each rank begins with a model of its own, of which that of rank 0 is trained.
        resumes: name of the run whose checkpoint it begins with.
        within: relative difference of its losses from those of one process that is rounding.
    """

    job: Job
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    packed: bool = False
    evaluates: bool = False
    exports: bool = False
    in_memory: bool = False
    resumes: str | None = None
    signal_at: int | None = None
    within: float = 2e-6


class OfTwoSources(SeveralSources):
    """Samples by turns of two sources, the losses of which are reported."""

    names = ("even", "odd")

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]

    def sources_of(self, rows: Sequence[int]) -> list[int]:
        return [row % 2 for row in rows]


class Signal(TrainerCallback):
    """Sends this process a signal in a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step and kwargs["trainer"].run.groups.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)


def spread(outputs: EvalPrediction) -> dict[str, float]:
    """How wide the logits of an evaluation are spread."""
    return {"spread": float(np.std(outputs.predictions))}


def begun_apart(model: str) -> PreTrainedModel:
    """Return a model that is another one on each rank but the first."""
    found = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        found.model.norm.weight.add_(dist.get_rank())
    return found


def is_exported(model: PreTrainedModel, folder: Path) -> bool:
    """Whether the weights of a model are those that a folder holds, in the form that transformers writes."""
    model.save_pretrained(folder / "brought")
    brought, exported = (load_file(path / "model.safetensors") for path in (folder / "brought", folder))
    return brought.keys() == exported.keys() and all(torch.equal(brought[key], exported[key]) for key in exported)


def make(name: str, run: Run, folder: str) -> dict[str, Any]:
    """Train; return what the metrics say of each step, the samples, and whether steps were skipped."""
    CALLED.clear()
    output = Path(folder, name)
    arguments = arguments_of(run.job, str(output), **{"max_steps": STEPS, **run.settings})
    texts = [{"text": TEXT[at : at + size]} for size in (7, 12, 20, 5, 16) for at in range(0, 300, 20)]
    trainer = Trainer(
        begun_apart(run.job.model) if run.in_memory else run.job.model,
        arguments,
        train_dataset=texts if run.packed else OfTwoSources(rows() * 4),
        eval_dataset=rows()[:3] if run.evaluates else None,
        compute_metrics=spread if run.evaluates else None,
        processing_class=ByteTokenizer() if run.evaluates or run.packed else None,
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear") if run.lora else None,
        callbacks=[Signal(run.signal_at)],
    )
    ended, generator = "", default_generator(here())
    drawn = generator.get_state()
    try:
        trainer.train(str(Path(folder, run.resumes, "checkpoint-2")) if run.resumes else None)
    except BaseException as error:
        if run.signal_at is None:
            raise
        ended = type(error).__name__
    keeps = torch.equal(drawn, generator.get_state())
    if run.exports:
        trainer.save_model()
    brought = trainer.trained_model() if run.exports and not run.lora else None
    skipped = trainer.run.engine.deepspeed.skipped_steps
    trainer.close()
    samples = output / "samples.jsonl"
    return {
        "losses": [line["loss"] for line in logged(output)],
        "eval": [
            line[name]
            for line in logged(output, "evaluations")
            for name in ("eval_loss", "eval_spread")
            if name in line
        ],
        "samples": samples.read_text() if samples.exists() else "",
        "skipped": skipped,
        "checkpoints": sorted(path.name for path in output.glob("checkpoint-*")),
        "ended": ended,
        "profile": (output / "profile").exists(),
        "brought": brought is None or is_exported(brought, output),
        "attention": set(CALLED),
        "keeps generators": keeps,
    }


def make_all(runs: dict[str, Run], folder: str) -> tuple[dict[str, Any], list[str]]:
    """Make runs one after the other on these ranks; also return what the device has reported."""
    with stand_ins():
        found = {name: make(name, run, folder) for name, run in runs.items()}
    return found, list(device.C.reports()) if device.is_installed() else []
