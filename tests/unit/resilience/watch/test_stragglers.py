"""A slow rank is named once it has been slow for some time, and then not again for a while."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from harness.console import Console
from harness.resilience.process.activity import ACTIVITY, Phase
from harness.resilience.watch.diagnosis import RankStatus
from harness.resilience.watch.stragglers import (
    AGAIN_S,
    EVERY_S,
    IN_A_ROW,
    LEAST_SAMPLES,
    Stragglers,
    share_of_work,
)
from tests.unit.resilience.watch.statuses import rank_status

Looks = Callable[[float], list[RankStatus]]


@pytest.fixture(autouse=True)
def alike_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACTIVITY, "stage_costs", [])


def ranks(*works: float, **changes: Any) -> list[RankStatus]:
    return [rank_status(rank, work=work, **changes) for rank, work in enumerate(works)]


def warnings_of(*looks: tuple[float, list[RankStatus]]) -> list[str]:
    """What is said after these looks, each at its second."""
    out = io.StringIO()
    stragglers = Stragglers(Console(out=out, error=out, speaks=True))
    for second, statuses in looks:
        stragglers.look(statuses, second)
    return out.getvalue().splitlines()


def every(
    seconds: float, count: int, statuses: list[RankStatus], start: float = EVERY_S
) -> list[tuple[float, list[RankStatus]]]:
    return [(start + seconds * number, statuses) for number in range(count)]


def test_a_rank_is_named_after_it_was_slow_for_some_time() -> None:
    slow = ranks(0.4, 0.9, 0.5)
    assert warnings_of(*every(EVERY_S, IN_A_ROW - 1, slow)) == []
    (words,) = warnings_of(*every(EVERY_S, IN_A_ROW, slow))
    assert words.startswith("warning: ") and "is slower than its peers: it works 90% of the time" in words
    assert "they work 45% and wait for it (up to step 7)" in words and "rank 1" in words


def test_looks_are_counted_at_their_distance_not_as_often_as_the_thread_comes() -> None:
    assert warnings_of(*every(0.2, 70, ranks(0.4, 0.9))) == []  # until second 18.8, the third look
    assert len(warnings_of(*every(0.2, 100, ranks(0.4, 0.9)))) == 1


def test_the_same_is_not_said_again_for_a_while() -> None:
    looks = every(EVERY_S, int(AGAIN_S / EVERY_S), ranks(0.4, 0.9))
    assert len(warnings_of(*looks)) == 1
    longer = every(EVERY_S, int(AGAIN_S / EVERY_S) + IN_A_ROW, ranks(0.4, 0.9))
    assert len(warnings_of(*longer)) == 2


def test_a_rank_that_catches_up_begins_anew() -> None:
    slow, even, other = ranks(0.4, 0.9), ranks(0.6, 0.6), ranks(0.9, 0.4)
    for between in (even, other):
        looks = [slow] * (IN_A_ROW - 1) + [between] + [slow] * (IN_A_ROW - 1)
        assert warnings_of(*((EVERY_S * (number + 1), statuses) for number, statuses in enumerate(looks))) == []


@pytest.mark.parametrize(
    "statuses",
    [
        pytest.param(ranks(0.9), id="a rank alone"),
        pytest.param(ranks(-1.0, 0.9), id="one was not looked at for long enough"),
        pytest.param(ranks(0.4, 0.9, phase=Phase.SLOW), id="an evaluation or a save"),
        pytest.param(ranks(0.01, 0.45), id="it holds nobody up"),
        pytest.param(ranks(0.7, 0.9), id="not much slower"),
    ],
)
def test_nothing_is_said(statuses: list[RankStatus]) -> None:
    assert warnings_of(*every(EVERY_S, 3 * IN_A_ROW, statuses)) == []


def test_a_stage_with_more_work_is_expected_to_work_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = every(EVERY_S, IN_A_ROW, ranks(0.45, 0.9))
    monkeypatch.setattr(ACTIVITY, "stage_costs", [1.0, 2.0])
    assert warnings_of(*looks) == []
    monkeypatch.setattr(ACTIVITY, "stage_costs", [1.0, 1.2])
    assert len(warnings_of(*looks)) == 1


def test_the_share_of_work_is_unknown_at_first() -> None:
    assert share_of_work([True] * (LEAST_SAMPLES - 1)) < 0
    assert share_of_work([True] * LEAST_SAMPLES) == 1.0
    assert share_of_work([True, False, False, False] * LEAST_SAMPLES) == 0.25
