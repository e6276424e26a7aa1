"""The link that a calibration measures: what runs of this host use."""

from __future__ import annotations

import time
from itertools import count
from unittest.mock import patch

import pytest
import torch.distributed as dist

from harness.extras import speed
from harness.extras.host_memory import HostMemory
from harness.parallel.collectives import leave_memory, share_memory
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def linked() -> tuple[float, float]:
    """Times of a link whose ranks have no other way than the memory that they share."""
    share_memory([dist.group.WORLD], HostMemory.open)
    with patch.object(dist, "all_reduce", side_effect=AssertionError("not through shared memory")):
        found = speed.link(sizes=(4, 2**16))
    leave_memory()
    return found


def test_the_link_is_the_memory_that_ranks_of_a_host_share() -> None:
    assert all(
        few >= 0 and many > 0 for few, many in run_ranks(2, linked)
    )  # few: what a sum adds to the work beside it


def linked_by_clocks_that_differ() -> tuple[float, float]:
    """The same, where the clock of one rank says that each try takes a second."""
    with patch.object(time, "perf_counter", side_effect=count(0.0, 1.0 if dist.get_rank() else 1e-6)):
        return linked()


def test_ranks_that_take_longer_join_in_every_sum() -> None:
    quick, slow = run_ranks(2, linked_by_clocks_that_differ)
    assert quick == pytest.approx((0, 1e-6))
    assert slow == pytest.approx((0, 1))
