"""Before and while ranks are watched, in one process: who its ranks are, what a watch shows, its limits."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import TrainingArguments
from harness.console import plain_console
from harness.device.process_group import start
from harness.resilience.process.activity import ACTIVITY, BEATS_OF_STEP, Phase, count_step, inside, leave
from harness.resilience.process.records import THIS_RANK
from harness.resilience.watch import meeting
from harness.resilience.watch.meeting import watching_for_stopped_ranks
from harness.resilience.watch.watcher import SLOW_S, Limits, Watcher, _view, watch_run
from harness.topology.env import LaunchEnv
from harness.topology.groups import Groups, build_groups
from harness.topology.layout import Layout
from harness.topology.process_status import is_stopped, status_of


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_look_at_other_ranks_ends_with_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "EVERY_S", 0.005)
    before = named("meeting")
    with pytest.raises(ValueError, match="own"), watching_for_stopped_ranks(30.0, plain_console(0)):
        (thread,) = [each for each in named("meeting") if each not in before]
        raise ValueError("own")
    thread.join(5)
    assert not thread.is_alive()
    with watching_for_stopped_ranks(0.0, plain_console(0)):  # 0: wait for ever
        assert named("meeting") == before


def test_a_process_that_no_launcher_started_is_its_only_rank() -> None:
    assert meeting._ranks_here() == {os.getpid(): os.environ.get("RANK", "")}


def test_only_a_process_in_state_t_is_stopped() -> None:
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**22 + 1)  # there is none of that number


@pytest.fixture
def groups() -> Iterator[Groups]:
    was_open = dist.is_initialized()
    start(LaunchEnv())
    yield build_groups(Layout.from_world(1, pp_size=1, tp_size=1))
    ACTIVITY.stop_watching()
    if not was_open:
        dist.destroy_process_group()


def watch(groups: Groups, folder: Path, **arguments: float) -> Watcher:
    found = watch_run(TrainingArguments(str(folder), **arguments), groups, plain_console(0))
    assert found is not None
    return found


def test_a_run_is_watched_until_it_ends_and_nothing_of_it_is_left(
    groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = watch(groups, tmp_path)
    assert ACTIVITY.is_watched and len(named("watch")) == 1
    assert list(tmp_path.iterdir()) == []  # the page has no name any more
    assert first.board.read(0).looked_at > 0 and first.others is None
    second = watch(groups, tmp_path)  # an earlier run of this process is not watched any longer
    assert not first._thread.is_alive() and len(named("watch")) == 1
    first.close()
    assert ACTIVITY.is_watched and ACTIVITY.row is second._row
    second.close()
    second.close()
    assert not ACTIVITY.is_watched and named("watch") == []


def test_what_a_rank_does_is_on_its_page_at_once(groups: Groups, tmp_path: Path) -> None:
    board = watch(groups, tmp_path).board
    before = board.read(0).beats
    with inside("training", Phase.STEP):
        count_step()
        row = board.read(0)
        assert (row.phase, row.doing, row.beats % BEATS_OF_STEP) == (Phase.STEP, "training", 1)
        assert row.beats > before
        with inside("saving " + "日" * 40):
            row = board.read(0)
            assert row.phase is Phase.SLOW and row.doing.startswith("saving 日") and len(row.doing.encode()) <= 66
    leave()
    assert board.read(0).phase is Phase.OUTSIDE


def test_a_rank_says_who_it_is_so_that_a_later_process_of_its_number_is_not_taken_for_it(
    groups: Groups, tmp_path: Path
) -> None:
    status = status_of(os.getpid())
    assert status is not None
    (found,) = watch(groups, tmp_path).members
    assert (found.rank, found.stage, found.pid, found.started) == (0, 0, os.getpid(), status.started)
    assert found.host == THIS_RANK.host
    assert _view() == _view() and len(_view().split()) == 5


@pytest.mark.parametrize(
    ("hang", "phase", "step_seconds", "limit"),
    [
        pytest.param(30, Phase.STEP, 1.0, 30, id="the-flag"),
        pytest.param(30, Phase.STEP, 100.0, 500, id="five-steps-where-that-is-longer"),
        pytest.param(30, Phase.STEP, 1e6, 1000, id="never-longer-than-a-collective-may-take"),
        pytest.param(30, Phase.STEP, None, SLOW_S, id="the-first-step-compiles"),
        pytest.param(30, Phase.SLOW, 1.0, SLOW_S, id="saving-takes-its-time"),
        pytest.param(900, Phase.SLOW, 1.0, 900, id="a-flag-beyond-that"),
        pytest.param(5000, Phase.STEP, 1.0, 1000, id="a-flag-beyond-a-collective"),
        pytest.param(0, Phase.STEP, 1.0, 0, id="for-ever"),
        pytest.param(0.5, Phase.STEP, 0.01, 0.5, id="impatient"),
    ],
)
def test_how_long_a_rank_may_make_no_progress(
    hang: float, phase: Phase, step_seconds: float | None, limit: float
) -> None:
    assert Limits(hang=hang, longest=1000.0).of(phase, step_seconds) == limit
