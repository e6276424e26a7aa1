"""The first cause among records in any order, and how starts and ends are named."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.resilience.cause import first_cause
from harness.resilience.on_host.processes import _family
from harness.resilience.on_host.ranks import Exit
from harness.resilience.process.records import Position, read_failures, read_positions, succeeded
from harness.resilience.script import Start
from harness.topology.layout import Layout
from tests.unit.resilience.simulated import failure, write_failure, write_position


def test_a_start_is_named_by_its_layout_and_ranks() -> None:
    assert str(Start(words=(), ranks=1)) == "1 rank" and str(Start(words=(), ranks=3)) == "3 ranks"
    layout = Layout(pp_size=2, tp_size=1, dp_size=1)
    assert str(Start(words=(), ranks=2, layout=layout)) == f"{layout} on 2 ranks"


RANKS = st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=5)


@settings(max_examples=40)
@given(RANKS, st.randoms(use_true_random=False))
def test_the_cause_does_not_depend_on_the_order_of_the_ends(ranks: list[int], draw: random.Random) -> None:
    ended = [Exit(rank, -9 if rank % 2 else 1, float(rank)) for rank in ranks]
    shuffled = draw.sample(ended, len(ended))
    positions = {rank: Position(rank=rank, host="a") for rank in ranks}
    first = first_cause([], ended, positions, oom_kills=0)
    assert first == first_cause([], shuffled, positions, oom_kills=0)
    killed = sorted(rank for rank in ranks if rank % 2)
    assert (
        first is not None and first.rank == (killed or sorted(ranks))[0]
    )  # a signal comes from outside, and goes first


@pytest.mark.parametrize(
    ("killed_at", "failed_at", "rank"),
    [
        pytest.param(2.0, 2.0, 1, id="at the same time the one that was killed"),
        pytest.param(2.9, 2.0, 1, id="or a moment later"),
        pytest.param(3.1, 2.0, 0, id="but not a second later"),
        pytest.param(1.0, 9.0, 1, id="or long before"),
    ],
)
def test_a_kill_goes_before_what_was_recorded_about_it(killed_at: float, failed_at: float, rank: int) -> None:
    killed = Exit(1, -signal.SIGSEGV, killed_at)
    found = first_cause([failure(0, time=failed_at)], [killed], {1: Position(rank=1, host="a")}, oom_kills=0)
    assert found is not None and found.rank == rank
    if rank == 1:
        assert found.text == "rank 1 (a) was killed by SIGSEGV before the first step" and found.code == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-64, "was killed by SIGRTMAX"),
        (-63, "was killed by signal 63"),
        (143, "was ended by SIGTERM"),
        (200, "ended with exit code 200 without a recorded error, before the run was complete,"),
        (0, "ended with exit code 0 without a recorded error, before the run was complete,"),
        (127, "ended with exit code 127 without a recorded error, before the run was complete,"),
    ],
)
def test_an_end_is_named(code: int, words: str) -> None:
    position = {0: Position(rank=0, host="b", stage=1, step=4, doing="saving")}
    found = first_cause([], [Exit(0, code, 1.0)], position, oom_kills=0)
    assert found is not None and found.text == f"rank 0 (b, stage 1) {words} in step 4 (saving)"
    assert found.step == 4 and not found.is_final and found.code == (127 if code == 127 else 1)


def test_a_hang_is_told_in_its_own_words_and_a_lost_peer_alone_is_better_than_nothing() -> None:
    hang = failure(0, error="Hang", message="rank 3 makes no progress")
    assert (found := first_cause([hang], [], {}, oom_kills=0)) is not None and found.text == "rank 3 makes no progress"
    lost = failure(2, is_lost_peer=True, message="")
    assert (found := first_cause([lost], [], {}, oom_kills=0)) is not None
    assert found.text == "rank 2 (a) failed in step 5: ValueError"


def test_records_are_read_by_time_and_as_far_as_they_are_whole(tmp_path: Path) -> None:
    assert (read_failures(tmp_path), read_positions(tmp_path), succeeded(tmp_path)) == ([], {}, None)
    for rank, time in ((0, 3.0), (1, 1.0), (10, 2.0)):
        write_failure(tmp_path, rank, time=time)
        write_position(tmp_path, rank, step=rank)
    (tmp_path / "rank-5.json").write_text('{"rank": 5')
    assert [one.rank for one in read_failures(tmp_path)] == [1, 10, 0]
    assert {rank: position.step for rank, position in read_positions(tmp_path).items()} == {0: 0, 1: 1, 10: 10}
    (tmp_path / "expected.json").touch()
    assert succeeded(tmp_path) is False
    (tmp_path / "success.json").touch()
    assert succeeded(tmp_path) is True


@pytest.mark.parametrize(
    ("processes", "family"),
    [
        ({1}, {1, 2, 3, 4}),
        ({3}, {3, 4}),
        ({4}, {4}),
        ({9}, {9}),  # not known
        (set(), set()),
        ({5}, {5, 6}),  # even in a circle, which a list of processes that changes may show
        ({2, 6}, {2, 3, 4, 5, 6}),
    ],
)
def test_who_descends_from_whom(processes: set[int], family: set[int]) -> None:
    assert _family(processes, {4: 3, 3: 2, 2: 1, 5: 6, 6: 5}) == family
