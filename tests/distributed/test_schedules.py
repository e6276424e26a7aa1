"""No schedule changes a number: each trains and evaluates as DeepSpeed's own.

To the last bit, where a stage has one model chunk. With several chunks other ranks sum the gradient norm, and the
gradients of tied weights are summed in another order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import Trainer
from harness.schedules import DEFAULT, INTERLEAVED, SCHEDULES
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, rows, steps_of, tiny_model

FOLDED = [name for name, each in SCHEDULES.items() if each.folded]

pytestmark = pytest.mark.ranks
SEVERAL_CHUNKS = (INTERLEAVED, *FOLDED)


def by_schedule(jobs: list[tuple[Job, list[str]]], folder: str) -> list[dict[str, list[float]]]:
    """Of each job, with each schedule, the loss and gradient norm of a step, of an evaluation, and of another step."""
    return [{name: _numbers(job, name, f"{folder}/{job.layout}/{name}") for name in names} for job, names in jobs]


def _numbers(job: Job, schedule: str, folder: str) -> list[float]:
    own = replace(job, config={**job.config, "pipeline": {**job.config["pipeline"], "schedule": schedule}})
    trainer = Trainer(job.model, arguments_of(own, folder), rows(), rows(masked=True))
    numbers = [number for step in steps_of(trainer, 1) for number in step]
    numbers.append(trainer.evaluate()["eval_loss"])
    numbers += [number for step in steps_of(trainer, 1) for number in step]
    trainer.close()
    return numbers


FIRST = ["zero-bubble"], ["zero-bubble-v"]
"""Schedules with one model chunk a stage, and with several."""
OTHERS = (
    [name for name in SCHEDULES if name not in (*FIRST[0], *SEVERAL_CHUNKS)],
    [name for name in SEVERAL_CHUNKS if name not in FIRST[1]],
)


@pytest.mark.parametrize(
    "schedules", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"]
)
def test_four_ranks_train_and_evaluate_alike_by_every_schedule(
    schedules: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    # the inner stages put off weight gradients past the next gradient that they receive
    model = tiny_model(tmp_path / "m", "llama", True, num_hidden_layers=4)
    pipeline = {"pipeline": {"stages": 4, "partition": "uniform"}, "bf16": {"enabled": True}}
    eight = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    one_chunk, several_chunks = ([DEFAULT, *(name for name in names if name != DEFAULT)] for names in schedules)
    # a folded model: the tied embedding and head on one stage; one activation crosses to the same rank
    both = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}
    numbers, several = run_ranks(
        4,
        by_schedule,
        [
            (Job(model, "pp4z1", {**pipeline, **eight}), one_chunk),
            (Job(model, "pp2tp2z1", both), several_chunks),
        ],
        str(tmp_path),
    )[0]
    assert numbers["1f1b"][0] > numbers["1f1b"][-2] > 0
    assert all(each == numbers["1f1b"] for each in numbers.values())
    for each in several.values():
        assert each == pytest.approx(several["1f1b"], rel=2e-6)
