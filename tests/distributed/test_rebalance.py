"""Layers move between stages while a run lives, and no number changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import Trainer, TrainerCallback
from harness.extras.rebalancing.rebalancer import Rebalancer, StageClock
from harness.report.profile.record import read_steps
from harness.training.callbacks import StepRecord
from harness.training.prepare.run import Run
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, logged, rows, tiny_model

pytestmark = pytest.mark.ranks

# all layers but one a part in the first part: as uneven as they can be
UNEVEN = {"pipeline": {"stages": 2, "partition": "type:Epilogue", "activation_checkpoint_interval": 1}}
STEPS, SAVED = 5, 4


class Stages(TrainerCallback):
    """Notes at the end of each step which stage has which layer, and the bytes of this rank's parameters."""

    def __init__(self) -> None:
        self.of_layers: list[list[int]] = []
        self.held: list[int] = []

    def on_step_end(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        run = kwargs["trainer"].run
        self.of_layers.append(stages_of_layers(run))
        self.held.append(sum(parameter.nbytes for parameter in run.module.parameters()))


def stages_of_layers(run: Run) -> list[int]:
    """The stage of each layer."""
    spans = enumerate(pairwise(run.boundaries))
    return [run.spec.resolved.chunks.stage_of(part) for part, (start, stop) in spans for _ in range(start, stop)]


@contextmanager
def times_by_layers(run: Run) -> Iterator[None]:
    """Have each layer take 1 ms, whatever the clock says: the times of steps this small are mostly noise."""
    measured, compared = StageClock.take, Rebalancer.after_step

    def by_chunk() -> list[float]:
        return [(stop - start) * 1e-3 for start, stop in pairwise(run.boundaries)]

    def take(clock: StageClock) -> dict[int, float]:
        return {chunk: by_chunk()[chunk] for chunk in measured(clock)}

    def after_step(rebalancer: Rebalancer, record: StepRecord) -> bool:
        seconds = [0.0] * run.spec.layout.pp_size
        for chunk, own in enumerate(by_chunk()):
            seconds[run.spec.resolved.chunks.stage_of(chunk)] += own
        return compared(rebalancer, replace(record, step_seconds=max(seconds)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageClock, "take", take)
        patch.setattr(Rebalancer, "after_step", after_step)
        yield


def train(job: Job, folder: str, rebalance: int | None, resume: str | None = None) -> dict[str, Any]:
    """Train, and save at step 4; return the losses, where the stages began and end, what was printed and profiled."""
    said: list[str] = []
    stages = Stages()
    arguments = arguments_of(
        job,
        f"{folder}/{rebalance}-{resume is not None}",
        max_steps=STEPS,
        save_steps=SAVED if rebalance else 0,
        rebalance_steps=rebalance,
        profile=2 if rebalance else 0,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
    )
    trainer = Trainer(job.model, arguments, rows(masked=True), callbacks=[stages])
    before = trainer.run.boundaries
    console = trainer.run.console
    object.__setattr__(console, "say", said.append)
    with times_by_layers(trainer.run):
        trainer.train(resume)
    after = trainer.run.boundaries
    trainer.close()
    described = json.loads((Path(arguments.output_dir) / "run.json").read_text())["stage_boundaries"]
    losses = [(row["loss"], row["learning_rate"]) for row in logged(arguments.output_dir)]
    return {
        "losses": losses,
        "before": before,
        "after": after,
        "said": said,
        "described": described,
        "stages": stages.of_layers,
        "held": stages.held,
        "profiles": list(read_steps(Path(arguments.output_dir))),
        "checkpoint": f"{arguments.output_dir}/checkpoint-{SAVED}",
    }


def each(jobs: list[Job], folder: str) -> list[tuple[dict[str, Any], ...]]:
    """Run each job without moves, with them, and on from what was saved after one."""
    found = []
    for number, job in enumerate(jobs):
        plain, moved = (train(job, f"{folder}/{number}", rebalance) for rebalance in (None, 2))
        found.append((plain, moved, train(job, f"{folder}/{number}", None, moved["checkpoint"])))
    return found


TWO = [("pp2z0", "dualpipe-v")]
OTHERS = [("pp2z1", None), ("pp2z0", "interleaved"), ("pp2z1", "zero-bubble-v")]
FOUR = [("pp2tp2z0", "zero-bubble"), ("pp2dp2z1", "gpipe")]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "runs"), [(2, TWO), (2, OTHERS), (4, FOUR)], ids=["two", "other schedules", "four"])
def test_layers_move_to_the_stage_with_less_to_do_and_no_number_changes(tmp_path, ranks, runs) -> None:
    model = tiny_model(tmp_path / "m", "llama", True, num_hidden_layers=6, intermediate_size=256)
    jobs = [Job(model, at, {"pipeline": {**UNEVEN["pipeline"], "schedule": schedule}}) for at, schedule in runs]
    found = run_ranks(ranks, each, jobs, str(tmp_path))[0]
    for (_, schedule), (plain, moved, resumed) in zip(runs, found, strict=True):
        assert plain["before"] == plain["after"] == moved["before"]
        assert moved["described"] == moved["after"]
        assert [rate for _, rate in moved["losses"]] == [rate for _, rate in plain["losses"]]
        losses = [loss for loss, _ in plain["losses"]]
        assert [loss for loss, _ in moved["losses"]] == pytest.approx(losses, rel=1e-6), schedule
        assert any("moving layers should make it" in line for line in moved["said"]), schedule
        assert any("less than before" in line for line in moved["said"]), schedule
        assert moved["stages"][SAVED - 1] != plain["stages"][SAVED - 1], schedule
        assert [loss for loss, _ in resumed["losses"]] == pytest.approx(losses[SAVED:], rel=1e-6), schedule
        assert [profile.step for profile in moved["profiles"]] == [3, 4]
        for profile in moved["profiles"]:  # buffers count as well
            held = moved["held"][profile.step - 1]
            assert profile.ranks[0].memory_bytes["parameters"] == pytest.approx(held, rel=0.01), schedule
