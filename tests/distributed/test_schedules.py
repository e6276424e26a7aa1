"""No schedule changes a number: each trains and evaluates as DeepSpeed's own, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import Trainer
from harness.config.values.layout_keys import SCHEDULES
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Job, arguments_of, rows, steps_of, tiny_model

pytestmark = pytest.mark.ranks


def by_schedule(job: Job, folder: str) -> dict[str, list[float]]:
    """With each schedule the losses and gradient norms of two steps, of an evaluation, and of another step."""
    found = {}
    for name in SCHEDULES:
        own = replace(job, config={**job.config, "pipeline": {**job.config["pipeline"], "schedule": name}})
        trainer = Trainer(job.model, arguments_of(own, f"{folder}/{name}"), rows(), rows(masked=True))
        numbers = [number for step in steps_of(trainer, 2) for number in step]
        numbers.append(trainer.evaluate()["eval_loss"])
        found[name] = numbers + [number for step in steps_of(trainer, 1) for number in step]
        trainer.close()
    return found


def test_four_stages_train_and_evaluate_alike_by_every_schedule(tmp_path: Path) -> None:
    # the inner stages put off weight gradients past the next gradient that they receive
    model = tiny_model(tmp_path / "m", "llama", True, num_hidden_layers=4)
    layout = {"pipeline": {"stages": 4, "partition": "uniform"}, "bf16": {"enabled": True}}
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    numbers = run_ranks(4, by_schedule, Job(model, "pp4z1", {**layout, **sizes}), str(tmp_path))[0]
    assert numbers["1f1b"][0] > numbers["1f1b"][-2] > 0
    assert all(each == numbers["1f1b"] for each in numbers.values())
