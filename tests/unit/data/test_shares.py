"""Which source a sample of a mixture comes from: by its number alone, in the asked shares, no sample left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data.shares import PERIOD, Shares

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


@given(weights, st.integers(0, 3 * PERIOD), st.integers(0, 400))
def test_any_run_of_samples_holds_each_source_in_its_share(given_weights: list[float], first: int, count: int) -> None:
    shares = Shares(given_weights)
    numbers, _ = shares.positions(first, count)
    found = np.bincount(numbers, minlength=len(given_weights))
    assert found.sum() == count
    exact = shares.slots / PERIOD * count
    assert np.abs(found - exact).max(initial=0) <= 2
    assert np.abs(shares.slots / PERIOD - shares.shares).max() <= len(given_weights) / PERIOD


@given(weights, st.integers(0, 2 * PERIOD), st.integers(0, 300))
def test_a_source_gives_its_samples_one_after_the_other(given_weights: list[float], first: int, count: int) -> None:
    shares = Shares(given_weights)
    numbers, places = shares.positions(first, count)
    before = shares.before(first)
    for source in range(len(given_weights)):
        own = places[numbers == source]
        assert own.tolist() == list(range(before[source], before[source] + len(own)))
    assert shares.before(first + count) == [old + int((numbers == source).sum()) for source, old in enumerate(before)]


def test_equal_sources_take_turns_and_a_tiny_one_has_its_turn_in_each_period() -> None:
    assert Shares([1.0, 1.0]).positions(0, 6)[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert Shares([1.0, 1.0, 2.0]).slots.tolist() == [PERIOD // 4, PERIOD // 4, PERIOD // 2]
    tiny = Shares([1e12, 1.0])
    assert tiny.slots.tolist() == [PERIOD - 1, 1]
    assert tiny.before(5 * PERIOD) == [5 * (PERIOD - 1), 5]


@pytest.mark.parametrize("size", [2, 3, 7, 50])
def test_a_period_is_dealt_out_whole(size: int) -> None:
    shares = Shares([1.0 / (number + 1) for number in range(size)])
    assert shares.slots.sum() == PERIOD and shares.slots.min() >= 1
    assert sorted(shares.slots, reverse=True) == shares.slots.tolist()
    numbers, places = shares.positions(0, PERIOD)
    assert len(set(zip(numbers.tolist(), places.tolist(), strict=True))) == PERIOD
