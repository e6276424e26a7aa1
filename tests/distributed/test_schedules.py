"""No schedule changes a number: each trains as DeepSpeed's own, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.values.layout_keys import SCHEDULES
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Curve, Job, tiny_model, train

pytestmark = pytest.mark.ranks


def by_schedule(job: Job, folder: str) -> dict[str, Curve]:
    """The same job with each schedule, with evaluations between the steps."""
    pipeline = job.config["pipeline"]
    return {
        name: train(replace(job, config={**job.config, "pipeline": {**pipeline, "schedule": name}}), f"{folder}/{name}")
        for name in SCHEDULES
    }


def test_four_stages_train_alike_by_every_schedule(tmp_path: Path) -> None:
    # the inner stages put off weight gradients past the next gradient that they receive
    model = tiny_model(tmp_path / "m", "llama", True, num_hidden_layers=4)
    layout = {"pipeline": {"stages": 4, "partition": "uniform"}, "bf16": {"enabled": True}}
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    curves = run_ranks(4, by_schedule, Job(model, "pp4z1", {**layout, **sizes}), str(tmp_path))[0]
    assert curves["1f1b"][0][0] > curves["1f1b"][-1][0]
    assert all(curve == curves["1f1b"] for curve in curves.values())
