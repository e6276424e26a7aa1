"""Every layout on a device that is as strict as a GPU: the losses of plain torch on a CPU, and nothing is reported."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.verify.tiny_copy import tiny_config
from harness.verify.tiny_copy import tiny_model as tiny_copy
from tests.support.expert_families import FAMILIES
from tests.support.ranks import run_ranks
from tests.support.simulated_device import device
from tests.support.training import Curve, Job, reference, tiny_model, train_all, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order
STEPS = 2  # the second one meets what the first has left
by_plain_torch = cache(partial(reference, steps=STEPS))


def train_jobs(jobs: list[Job], folder: str) -> list[Curve]:
    return train_all([replace(job, arguments={"max_steps": STEPS}) for job in jobs], folder)


def schedule(name: str, **more: Any) -> dict[str, Any]:
    """A config of two stages that recomputes every layer, with a schedule."""
    return {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1, "schedule": name, **more}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", False)


def wrong(jobs: list[Job], curves: list[Curve], loss: float = LOSS, norm: float = NORM, **of: Any) -> list[str]:
    """Say which jobs have other losses or norms than plain torch on a CPU."""
    found = []
    for job, curve in zip(jobs, curves, strict=True):
        off = worst(curve, by_plain_torch(job.model, masked=job.masked, **of))
        if not (off[0] < loss and off[1] < norm):
            found.append(f"{Path(job.model).name} {job.layout} {job.config}: loss {off[0]:.1e}, norm {off[1]:.1e}")
    return found


CPU = {"device": "cpu"}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}}}
TILED = {"tiling": {"loss": 7, "feed_forward": 5}, "activation_checkpointing": {"cpu_checkpointing": True}}
MEASURED = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1, "partition": "measured"}}
SHARED = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
BF16 = {"bf16": {"enabled": True}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}  # no kernel is made


Layouts = list[tuple[str, dict[str, Any]]]
FIRST: Layouts = [
    ("pp2z1", schedule("zero-bubble-v")),
    ("tp2z1", {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}),
    ("dp2z1", {}),
    ("cp2z1", {"context_parallel": {"size": 2}, **TILED}),
    ("dp2z3", BF16),
]
OTHERS: Layouts = [
    ("dp2z3", {**zero(3, offload_optimizer=CPU, offload_param=CPU), **ADAM}),
    ("pp2z0", MEASURED),
    ("tp2z0", SHARED),
    ("tp2z1", COMPILED),
    ("dp2z3", zero(3, stage3_param_persistence_threshold=0)),
    ("pp2z0", BF16),
    ("pp2z1", {}),
    ("pp2z1", schedule("zero-bubble")),
    ("pp2z1", schedule("interleaved")),
    ("pp2z0", schedule("dualpipe-v")),
    ("dp2z0", {}),
    ("dp2z2", {**zero(2, overlap_comm=True), **ADAM}),
    ("dp2z2", {**zero(2, offload_optimizer=CPU), **ADAM}),
    ("tp2z1", BF16),
]


@pytest.mark.parametrize("layouts", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_a_layout_comes_to_the_numbers_of_plain_torch(layouts: Layouts, model: str, tmp_path: Path) -> None:
    several = tiny_model(tmp_path / "four", "qwen3", True, num_hidden_layers=4)
    tiny_copy(tiny_config("ernie4_5_moe")).save_pretrained(tmp_path / "ernie")  # it keeps its routers in float32
    jobs = []
    for layout, config in layouts:
        chunks = "schedule" in config.get("pipeline", {})
        own = several if chunks else str(tmp_path / "ernie") if (layout, config) == ("dp2z3", BF16) else model
        jobs.append(Job(own, layout, config, masked=layout == "pp2z1"))
    curves = run_ranks(2, train_jobs, jobs, str(tmp_path / "runs"), timeout_s=400)[0]
    exact, rounded = ([index for index, job in enumerate(jobs) if (job.config == BF16) is so] for so in (False, True))
    assert wrong([jobs[at] for at in exact], [curves[at] for at in exact]) == []
    in_bf16 = [jobs[at] for at in rounded], [curves[at] for at in rounded]
    assert wrong(*in_bf16, 0.01, 0.05, dtype=torch.bfloat16) == []


def train_on_the_one_device_that_is_seen(jobs: list[Job], folder: str) -> list[Curve]:
    if device.is_installed():  # else they share a GPU, and see no other
        torch.accelerator.set_device_index(0)
        device.C.see(1)
    return train_jobs(jobs, folder)


def test_a_rank_that_sees_one_device_takes_it_whatever_its_local_rank(model: str, tmp_path: Path) -> None:
    jobs = [Job(model, "pp2z1"), Job(model, "dp2z3")]
    curves = run_ranks(2, train_on_the_one_device_that_is_seen, jobs, str(tmp_path))[0]
    assert wrong(jobs, curves) == []


@pytest.mark.thorough
def test_axes_together(tmp_path: Path) -> None:
    shared = FAMILIES["deepseek_v3"]  # a shared expert, which runs while tokens travel
    experts = tiny_model(tmp_path / "deepseek", "deepseek_v3", False, **shared)
    jobs = [Job(experts, "pp2dp2z0", {"expert_parallel": {"enabled": True, "autoep_size": 2}})]
    curves = run_ranks(4, train_jobs, jobs, str(tmp_path), timeout_s=300)[0]
    assert wrong(jobs, curves, 5e-6, 1e-4) == []  # rounding also moves what the routers compare


@pytest.mark.thorough
def test_other_axes_together(model: str, tmp_path: Path) -> None:
    jobs = [Job(model, "pp2dp2z1", schedule("zero-bubble")), Job(model, "tp2dp2z3"), Job(model, "pp2tp2z1")]
    assert wrong(jobs, run_ranks(4, train_jobs, jobs, str(tmp_path), timeout_s=300)[0]) == []
