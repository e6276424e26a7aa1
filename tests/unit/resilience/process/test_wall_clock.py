"""Each second of a process counts once, and run.json keeps them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from harness.resilience.process import activity
from harness.resilience.process.activity import WallClock
from harness.training.recording import files


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> tuple[Time, WallClock]:
    moment = Time()
    monkeypatch.setattr(activity.time, "monotonic", moment)
    return moment, WallClock(since=90.0)


def test_an_inner_activity_is_not_counted_for_the_outer_one(clock: tuple[Time, WallClock]) -> None:
    moment, counted = clock
    with counted.spent_on("training"):
        moment.now += 3
        with pytest.raises(ValueError, match="full"), counted.spent_on("saving"):
            moment.now += 2
            raise ValueError("full")
        moment.now += 1
    moment.now += 4
    assert counted.seconds() == {"starting": 14.0, "training": 4.0, "saving": 2.0, "total": 20.0}


def test_a_process_begins_when_the_system_says_and_a_fork_begins_anew() -> None:
    read, write = os.pipe()
    counted = WallClock(since=time.monotonic() - 1000)
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(counted.seconds()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(read, 1000))["total"] < 100
    assert counted.seconds()["total"] >= 1000
    assert activity.CLOCK.seconds()["total"] < 10_000


def test_run_json_keeps_the_first_step(
    clock: tuple[Time, WallClock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, counted = clock
    monkeypatch.setattr(files, "CLOCK", counted)
    (tmp_path / "run.json").write_text('{"run_id": "7"}')
    files.note_wall_clock(tmp_path, first_step=0.5)
    moment.now += 2
    files.note_wall_clock(tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    wall_clock = {"starting": 12.0, "total": 12.0, "first_step": 0.5}
    assert found == {"run_id": "7", "wall_clock": wall_clock, "longest_save_s": 0.0}
    files.note_wall_clock(tmp_path / "gone")  # no numbers are worth an error at the end of a run
