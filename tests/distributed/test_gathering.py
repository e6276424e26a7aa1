"""The micro-batches of a step share the parameters that ZeRO-3 has gathered, where the config gives it room for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from harness import Trainer
from harness.extras.host_memory import HostMemory
from tests.support.ranks import run_ranks
from tests.support.simulated_device.process_group import Group
from tests.support.training import BATCH, Curve, Job, arguments_of, rows, tiny_model

pytestmark = pytest.mark.ranks
STEPS, MICRO_BATCHES = 2, 4
CASES: dict[str, dict[str, Any]] = {
    "room for all": {},
    "kept from a forward to its backward alone": {"stage3_max_live_parameters": 1},
    "gathered in the backward again": {"stage3_max_reuse_distance": 0},
    "another copy of each group of ranks": {"zero_hpz_partition_size": 2},
    "from the host": {"offload_param": {"device": "cpu"}},
}


def job(model: str, interval: int, zero: dict[str, Any]) -> Job:
    config = {
        "train_micro_batch_size_per_gpu": BATCH // 2 // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "pipeline": {"activation_checkpoint_interval": interval},
    }
    return Job(model, "dp2z3", config)


def train(own: Job, folder: str) -> tuple[Curve, list[float]]:
    """Losses and norms of the steps, and how often each of them gathers all parameters."""
    numbers = 0
    whole_of_deepspeed, of_device = HostMemory.all_gather, Group.allgather_into_tensor_coalesced

    def counted(memory: HostMemory, x: Tensor, out: Tensor | None = None) -> Tensor:
        nonlocal numbers
        whole = whole_of_deepspeed(memory, x, out)
        numbers += whole.numel()
        return whole

    def counted_on_device(group: Group, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        nonlocal numbers
        numbers += sum(output.numel() for output in outputs)
        return of_device(group, outputs, inputs, opts)

    curve, gathered = [], []
    with (
        patch.object(HostMemory, "all_gather", counted),
        patch.object(Group, "allgather_into_tensor_coalesced", counted_on_device),
    ):
        trainer = Trainer(own.model, arguments_of(own, folder), train_dataset=rows())
        total = sum(parameter.ds_numel for parameter in trainer.run.module.parameters())
        for _ in range(STEPS):
            numbers = 0
            record = trainer.training_step()
            curve.append((record.loss, record.grad_norm or 0.0))
            gathered.append(round(numbers / total, 4))
        trainer.close()
    return curve, gathered


def train_all(model: str, interval: int, folder: Path) -> dict[str, tuple[Curve, list[float]]]:
    return {name: train(job(model, interval, zero), os.fspath(folder / name)) for name, zero in CASES.items()}


@pytest.mark.parametrize("interval", [1, pytest.param(0, marks=pytest.mark.thorough)], ids=["recomputed", "stored"])
def test_parameters_are_gathered_once_a_step(interval: int, tmp_path: Path) -> None:
    """Whether layers are recomputed or not, with the same numbers to the bit."""
    model = tiny_model(tmp_path / "m", "llama", False)
    found = run_ranks(2, train_all, model, interval, tmp_path, timeout_s=300)[0]
    curve, gathered = found["room for all"]
    assert gathered == [1.0] * STEPS
    for name in CASES:
        assert found[name][0] == curve, name
        if name != "room for all":
            assert min(found[name][1]) >= MICRO_BATCHES, name
