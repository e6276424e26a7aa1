"""Compiled decoder layers train to the same numbers as plain torch, in every layout that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, reference, tiny_model, train, worst

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}  # traced and differentiated, but no C++ is compiled


def compiled(model: str, layout: str, **sections: Any) -> Job:
    return Job(model, layout, config={**sections, **COMPILED})


def curves_and_graphs(jobs: list[Job], folder: str) -> list[tuple[Curve, int]]:
    """Of each job its curve, and how many graphs were compiled."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    found = []
    for index, job in enumerate(jobs):
        reset()
        counters.clear()
        curve = train(job, f"{folder}/{index}")
        found.append((curve, counters["stats"]["unique_graphs"]))
    return found


def check(ranks: int, jobs: list[Job], folder: Path) -> None:
    found = run_ranks(ranks, curves_and_graphs, jobs, str(folder), timeout_s=300)[0]
    for job, (curve, graphs) in zip(jobs, found, strict=True):
        loss, norm = worst(curve, reference(job.model))
        assert loss < LOSS and norm < NORM, f"{Path(job.model).name} {job.layout}: loss {loss:.1e}, norm {norm:.1e}"
        assert graphs > 0, job.layout


def test_compiled_layers_train_to_the_same_numbers(tmp_path: Path) -> None:
    llama = tiny_model(tmp_path / "llama", "llama", True)
    shared = {"autotp_size": 2, "sequence_parallel": True}
    check(2, [compiled(llama, "tp2z1", tensor_parallel=shared)], tmp_path)


def test_so_they_do_in_stages_and_on_data_ranks(tmp_path: Path) -> None:
    llama = tiny_model(tmp_path / "llama", "llama", True)
    gemma = tiny_model(tmp_path / "gemma2", "gemma2", False)
    zero_bubble = {"stages": 2, "schedule": "zero-bubble", "activation_checkpoint_interval": 0}
    check(2, [compiled(gemma, "pp2z0", pipeline=zero_bubble), compiled(llama, "dp2z2")], tmp_path)
