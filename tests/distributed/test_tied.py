"""Tied weights on two stages stay equal and learn what one process learns, wherever their gradients are accumulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Trainer
from harness.verify.tiny_copy import tiny_config
from harness.verify.tiny_copy import tiny_model as tiny_copy
from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, arguments_of, reference, rows, steps_of, tiny_model, worst

pytestmark = pytest.mark.ranks

STEPS = 5
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
OFFLOADED = {**BF16, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
LATE = {"pipeline": {"stages": 2, "schedule": "zero-bubble"}}
"""Some weight gradients come after the backward passes."""


LLAMA, BLOCKS = "llama", "blocks"  # of the latter, each stage uses a part of a block
FIRST = [
    Job(LLAMA, "pp2z1", {**OFFLOADED, **LATE}),
    Job(BLOCKS, "pp2z1", BF16),
]
OTHERS = [
    Job(LLAMA, "pp2z0", BF16),
    Job(LLAMA, "pp2z1", {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}),
    Job(LLAMA, "pp2z1", OFFLOADED),
    Job(LLAMA, "pp2z1", {"data_types": {"grad_accum_dtype": "bf16"}}),
    Job(BLOCKS, "pp2z0", BF16),
    Job(BLOCKS, "pp2z1", OFFLOADED),
]
"""Jobs for each place of a gradient."""


def tied_after(job: Job, folder: str) -> tuple[Curve, dict[str, list[torch.Tensor]]]:
    """The curve of a job, and what this stage holds of each tied weight after it."""
    trainer = Trainer(job.model, arguments_of(job, folder, max_steps=STEPS), rows())
    curve = steps_of(trainer, STEPS)
    held = {
        key: [weight.detach().float().clone() for weight in weights.parameters()]
        for key, weights in trainer.engine.deepspeed.module.tied_modules.items()
    }
    trainer.close()
    return curve, held


def all_tied(jobs: list[Job], folder: str) -> list[tuple[Curve, dict[str, list[torch.Tensor]]]]:
    return [tied_after(job, f"{folder}/{index}") for index, job in enumerate(jobs)]


@pytest.mark.parametrize("kinds", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_tied_weights_stay_equal_and_learn_as_in_one_process(kinds: list[Job], tmp_path: Path) -> None:
    tiny_model(tmp_path / LLAMA, "llama", True)
    tiny_copy(tiny_config("zamba2")).save_pretrained(tmp_path / BLOCKS)
    jobs = [replace(job, model=str(tmp_path / job.model)) for job in kinds]
    first, second = run_ranks(2, all_tied, jobs, str(tmp_path / "out"), timeout_s=400)
    wanted = {model: reference(model, STEPS, dtype=torch.bfloat16) for model in {job.model for job in jobs}}
    for index, job in enumerate(jobs):
        (curve, held), (_, other) = first[index], second[index]
        loss, norm = worst(curve, wanted[job.model])
        assert loss < 0.01 and norm < 0.05, (index, job, curve, wanted[job.model])
        shared = held.keys() & other.keys()
        assert shared and all(map(torch.equal, held[key], other[key]) for key in shared), (index, job)
