"""The simulated device reports what a GPU would not forgive, and nothing else."""

from __future__ import annotations

import pytest

from tests.simulated_device import sins
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_each_fault_of_one_process_is_reported() -> None:
    (found,) = run_ranks(1, sins.alone, process_group=False)
    wanted = {act.__name__: words for act, words in sins.ALONE.items()}
    assert [f"{name}: {found[name]}" for name, words in wanted.items() if words not in found[name]] == []


def test_what_is_right_is_not_reported() -> None:
    (found,) = run_ranks(1, sins.virtues, process_group=False)
    assert found == {
        "indices and scalars of the host": [2.0, 2.0],
        "generator": True,
        "another stream": [2.0, 2.0, 2.0],
        "another device": [2.0, 2.0, 2.0],
        "is_pinned": [True, True, False],
        "before": True,
        "after": [6.0, 6.0, 6.0],
        "moved": True,
        "convolution": [[[3.0] * 3] * 2, [3.0] * 2],
        "conjugate": [5.0] * 3,
        "uninitialised": False,
    }


def test_each_way_to_wait_for_the_device_is_counted() -> None:
    (found,) = run_ranks(1, sins.counted, process_group=False)
    assert found == {
        "item": 1,
        "copy to the host": 1,
        "copy to the device": 1,
        "copy from pageable memory": 1,
        "aten::nonzero": 1,
        "aten::index": 1,
        "synchronize device": 1,
    }


def test_each_fault_of_two_ranks_is_reported() -> None:
    both = run_ranks(2, sins.together)
    for act, words in sins.TOGETHER.items():
        said = [found[act.__name__] for found in both]
        assert any(words in each for each in said), f"{act.__name__}: {said}"
