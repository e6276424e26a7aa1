"""The order of samples: a permutation an epoch, fixed for good, and runs of it over the ends of epochs."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.batches.order import batch_indices, sample_order

SEEDS = st.integers(0, 2**40)


@given(n=st.integers(0, 300), seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(sample_order(n, seed, epoch)) == list(range(n))


def test_the_order_is_frozen_because_a_resumed_run_depends_on_it():
    assert sample_order(12, seed=0, epoch=0).tolist() == [1, 3, 0, 9, 6, 8, 7, 2, 11, 4, 5, 10]
    assert sample_order(12, seed=42, epoch=3).tolist() == [10, 3, 9, 8, 11, 5, 1, 0, 4, 6, 2, 7]
    assert sample_order(10**12, seed=7, epoch=1, positions=[0, 1, 10**12 - 1]).tolist() == [
        154843299368,
        179459578161,
        77787712772,
    ]


@given(n=st.integers(1, 300), seed=SEEDS, positions=st.lists(st.integers(0, 299)))
def test_a_place_is_the_same_whatever_else_is_asked_for(n, seed, positions):
    positions = [place % n for place in positions]
    assert sample_order(n, seed, 1, positions).tolist() == sample_order(n, seed, 1)[positions].tolist()


@pytest.mark.parametrize("n", [10**8, 10**12 + 39])
def test_a_batch_of_a_large_data_set_takes_no_memory_for_the_rest(n):
    tracemalloc.start()
    batch = batch_indices(n - 500, 1000, n, seed=3)  # over the end of an epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(set(batch[:500])) == len(set(batch[500:])) == 500
    assert batch.min() >= 0 and batch.max() < n and batch.max() > 0.99 * n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_permutation_comes_as_often_as_any_other(n):
    kinds = math.factorial(n)
    seen = Counter(tuple(sample_order(n, seed, 0).tolist()) for seed in range(20 * kinds))
    chi_square = sum((seen[order] - 20) ** 2 / 20 for order in itertools.permutations(range(n)))
    # kinds - 1 is expected; its standard deviation is sqrt(2 (kinds - 1)), and 5 of them are one chance in a million
    assert chi_square < kinds - 1 + 5 * math.sqrt(2 * (kinds - 1)) + 5


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (2**32, 0), (0, 2**32)])
def test_neither_places_nor_epochs_nor_seeds_are_correlated(seed, epoch):
    n = 20_000
    order, other = sample_order(n, 0, 0).astype(float), sample_order(n, seed, epoch).astype(float)
    pairs = [(order, other), (order, np.arange(n)), (order[1:], order[:-1]), (order[1:] - order[:-1], other[1:])]
    for first, second in pairs:
        # of independent values it is 1 / sqrt(n) large
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(n)


def test_a_stretch_of_an_epoch_covers_the_data_evenly():
    tenth = sample_order(10**9, seed=5, epoch=2, positions=np.arange(100_000))
    # 1000 of each hundredth are expected; the standard deviation is 32
    assert np.abs(np.bincount(tenth // 10**7, minlength=100) - 1000).max() < 160


def test_seeds_and_epochs_give_orders_of_their_own():
    orders = {tuple(sample_order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_no_place_prefers_a_sample():
    first = [sample_order(10, seed, 0)[0] for seed in range(1000)]
    # 100 expected of each; the standard deviation is 9.5, and 5 of them leave 1 chance in a million.
    assert np.abs(np.bincount(first, minlength=10) - 100).max() < 48


@given(
    n=st.integers(1, 40),
    seed=SEEDS,
    start=st.integers(0, 90),
    counts=st.lists(st.integers(0, 45), max_size=4),
)
def test_runs_of_any_length_join_to_the_epochs_one_after_the_other(n, seed, start, counts):
    total = start + sum(counts)
    epochs = [sample_order(n, seed, epoch) for epoch in range(total // n + 1)]
    expected = np.concatenate(epochs)[start:total].tolist()
    joined = []
    for count in counts:
        joined += batch_indices(start + len(joined), count, n, seed).tolist()
    assert joined == expected
