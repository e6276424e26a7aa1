"""Ranks that share each sequence, by context or sequence parallelism, held to plain torch or to ranks that do not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from harness import Trainer, UserError
from tests.support.ranks import here, run_ranks
from tests.support.training import BLOCK, STEPS, Curve, Job, arguments_of, by_torch, rows, steps_of, worst

LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order
LORA = dict(r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")
SAVED = 2  # steps before the checkpoint from which a run goes on
SPLIT = 13  # tokens of the first of two documents


@dataclass(frozen=True)
class SharedJob(Job):
    """A job whose ranks share sequences in `deepspeed_config`, and do not in `unshared_config`.

    Attributes:
        length: of the samples, in tokens.
        interval: of activation checkpointing.
        packed: each sample holds two documents.
        drawn: random numbers are drawn, so that the same ranks without sharing are the reference.
        resumed: it goes on without sharing from its checkpoint.
        evaluated: it also evaluates and predicts, as the same ranks do without sharing.
    """

    length: int = BLOCK
    interval: int = 0
    packed: bool = False
    drawn: bool = False
    resumed: bool = False
    evaluated: bool = False

    def unshared_config(self) -> dict[str, Any]:
        """Return the config of the same ranks without sharing."""
        raise NotImplementedError

    def training(self) -> AbstractContextManager[object]:
        """Return what a run with sharing is made in."""
        return nullcontext()

    def samples(self) -> list[dict[str, list[int]]]:
        """Return a global batch."""
        ids = [row["input_ids"][: self.length] for row in rows()]
        if not self.packed:
            return [{"input_ids": row} for row in ids]
        positions = [*range(SPLIT), *range(self.length - SPLIT)]
        labels = [[-100 if i == SPLIT else x for i, x in enumerate(row)] for row in ids]
        return [{"input_ids": a, "labels": b, "position_ids": positions} for a, b in zip(ids, labels, strict=True)]


def reference(job: SharedJob) -> Curve:
    """The same training by plain torch on the whole model."""
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).train()
    data = {name: torch.tensor([row[name] for row in job.samples()]) for name in job.samples()[0]}
    labels = data.pop("labels", data["input_ids"])

    def loss_of_batch() -> torch.Tensor:
        logits = model(**data, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return by_torch(model, loss_of_batch)


def curve(job: SharedJob, folder: str, config: dict[str, Any], *, done: int = 0) -> Curve:
    """Train with a config, from the checkpoint after `done` steps on; also what is evaluated and predicted."""
    arguments = dict(job.arguments)
    lora = arguments.pop("lora", None)
    if job.drawn and here().type != "cpu":
        arguments["attn_implementation"] = "eager"  # fused kernels draw masks by themselves
    more: dict[str, Any] = {"resume_from_checkpoint": "auto"} if done else {}
    settings = arguments_of(Job(job.model, job.layout, arguments=arguments), folder, **more)
    settings.deepspeed_config = config
    trainer = Trainer(job.model, settings, train_dataset=job.samples(), peft_config=lora and LoraConfig(**lora))
    found = []
    if job.resumed and not done:
        found = steps_of(trainer, SAVED)
        trainer.save_checkpoint()
    found += steps_of(trainer, STEPS - done - len(found))
    if job.evaluated:
        metrics = trainer.evaluate(job.samples()[:5])
        predicted = trainer.predict(job.samples()[:5])
        found.append((metrics["eval_loss"], float(abs(predicted.predictions).sum())))
    trainer.close()
    return found


def curves_of(jobs: Sequence[SharedJob], refused: SharedJob | None, folder: str) -> tuple[list[list[Curve]], str]:
    """What ranks do: curves with sharing, each with what it is to be where that takes these ranks; and a refusal."""
    found = []
    for index, job in enumerate(jobs):
        place, unshared = f"{folder}/{index}", job.unshared_config()
        with job.training():
            curves = [curve(job, place, job.deepspeed_config())]
        if job.resumed:
            curves.append(curves[0][:SAVED] + curve(job, place, unshared, done=SAVED))
        elif job.drawn:
            curves.append(curve(job, f"{place}-unshared", unshared))
        found.append(curves)
    if refused is None:
        return found, ""
    with pytest.raises(UserError) as error:
        curve(refused, f"{folder}/refused", refused.deepspeed_config())
    return found, str(error.value)


def check(
    jobs: Sequence[SharedJob], ranks: int, folder: Path, refused: SharedJob | None = None, refusal: str = ""
) -> None:
    """Require that sharing changes no number, and that what is refused is refused in these words."""
    results = run_ranks(ranks, curves_of, jobs, refused, str(folder), timeout_s=300)
    assert {said for _, said in results} == {refusal}
    wrong = []
    for job, (got, *wanted) in zip(jobs, results[0][0], strict=True):
        loss, norm = worst(got, wanted[0] if wanted else reference(job))
        if loss > LOSS or norm > NORM:
            wrong.append(f"{Path(job.model).name} {job.layout}: loss {loss:.1e}, norm {norm:.1e}")
    assert not wrong
