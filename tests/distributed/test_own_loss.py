"""A user's own loss of a HuggingFace model gives the numbers of plain torch, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from harness import Trainer
from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, arguments_of, by_torch, rows, steps_of, tiny_model, worst

pytestmark = pytest.mark.ranks


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Needs every logit of the vocabulary: label smoothing, and the square of the log of the softmax' denominator."""
    flat, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return functional.cross_entropy(flat, wanted, label_smoothing=0.3) + 0.01 * flat.logsumexp(-1).square().mean()


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    flat, wanted = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return functional.cross_entropy(flat, wanted, label_smoothing=0.3, reduction="sum") / num_items_in_batch


def curves(jobs: list[Job], folder: str) -> list[Curve]:
    found = []
    for job in jobs:
        arguments = arguments_of(job, f"{folder}/{job.layout}")
        data = rows(job.masked)
        loss: Any = {"compute_loss_func": summed} if job.masked else {"loss_fn": smoothed}
        if job.arguments:
            loss = {}
        trainer = Trainer(job.model, arguments, train_dataset=data, eval_dataset=data[:5], **loss)
        found.append([*steps_of(trainer), (trainer.evaluate()["eval_loss"], 1.0)])
        trainer.close()
    return found


def reference(model_dir: str, masked: bool) -> Curve:
    """Plain torch on the whole model, the whole batch at once."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    data = rows(masked)
    ids = torch.tensor([row["input_ids"] for row in data])
    labels = torch.tensor([row.get("labels", row["input_ids"]) for row in data])

    def loss_of(n: int) -> Tensor:
        outputs = model(ids[:n])
        if not masked:
            return smoothed(outputs.logits, labels[:n])
        return summed(outputs, labels[:n], (labels[:n, 1:] != -100).sum())

    curve = by_torch(model, lambda: loss_of(len(ids)))
    with torch.no_grad():
        return [*curve, (loss_of(5).item(), 1.0)]


Layouts = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
FIRST: Layouts = ("tp2z1",), ("dp2z3",), ("pp2z0",)
"""Of a loss function, of one that is given the outputs, and of the flag for label smoothing."""
OTHERS: Layouts = ("pp2z0", "dp2z2", "dp2z3"), ("tp2z0",), ("tp2z1", "dp2z2")


@pytest.mark.parametrize("layouts", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_a_loss_of_the_logits_is_that_of_plain_torch_in_every_layout(layouts: Layouts, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True)
    of_logits, of_outputs, smoothing = layouts
    jobs = [Job(model, layout) for layout in of_logits]
    jobs += [Job(model, layout, masked=True) for layout in of_outputs]
    flag = {"label_smoothing_factor": 0.3}
    jobs += [Job(model, layout, masked=True, arguments=flag) for layout in smoothing]
    wanted = {masked: reference(model, masked) for masked in (False, True)}
    for job, curve in zip(jobs, run_ranks(2, curves, jobs, str(tmp_path))[0], strict=True):
        loss, norm = worst(curve, wanted[job.masked])
        assert loss < 2e-6 and norm < 2e-5, (job.layout, loss, norm)
