"""The order of samples: a permutation an epoch, fixed for good, and runs of it over the ends of epochs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.training.data.order import batch_indices, sample_order

SEEDS = st.integers(0, 2**40)


@given(n=st.integers(0, 300), seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(sample_order(n, seed, epoch)) == list(range(n))


def test_the_order_is_frozen_because_a_resumed_run_depends_on_it():
    assert sample_order(12, seed=0, epoch=0).tolist() == [0, 2, 11, 9, 1, 8, 5, 4, 3, 10, 6, 7]
    assert sample_order(12, seed=42, epoch=3).tolist() == [1, 6, 3, 4, 5, 9, 2, 8, 0, 7, 11, 10]


def test_seeds_and_epochs_give_orders_of_their_own():
    orders = {tuple(sample_order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_no_place_prefers_a_sample():
    first = [sample_order(10, seed, 0)[0] for seed in range(5000)]
    # 500 expected of each; the standard deviation is 21, and 5 of them leave 1 chance in a million.
    assert np.abs(np.bincount(first, minlength=10) - 500).max() < 106


@given(
    n=st.integers(1, 40),
    seed=SEEDS,
    start=st.integers(0, 200),
    counts=st.lists(st.integers(0, 90), max_size=5),
)
def test_runs_of_any_length_join_to_the_epochs_one_after_the_other(n, seed, start, counts):
    total = start + sum(counts)
    epochs = [sample_order(n, seed, epoch) for epoch in range(total // n + 1)]
    expected = np.concatenate(epochs)[start:total].tolist()
    joined = []
    for count in counts:
        joined += batch_indices(start + len(joined), count, n, seed).tolist()
    assert joined == expected
