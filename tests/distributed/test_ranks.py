"""The runner itself: results in rank order, and failures that say which rank and why."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_device, run_ranks

pytestmark = pytest.mark.ranks


@on_device
def add_up(start: int) -> tuple[int, int, str]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.environ["LOCAL_RANK"]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} cannot go on")
    dist.barrier()


def hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, add_up, 10) == [(0, 33, "0"), (1, 33, "1"), (2, 33, "2")]


def test_a_failing_rank_is_named_first_with_its_traceback() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(2, fail_on, 1)
    text = str(failure.value)
    assert text.index("--- rank 1") < text.index("--- rank 0")
    assert "ValueError: rank 1 cannot go on" in text


def test_a_hanging_rank_is_stopped_and_shows_where_it_stands() -> None:
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 was the first.*in hang_on"):
        run_ranks(2, hang_on, 1, timeout_s=1, process_group=False)
    assert time.monotonic() - started < 60
