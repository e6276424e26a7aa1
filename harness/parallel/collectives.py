"""Collectives over a process group: torch.distributed, or shared memory for CPU tensors on one host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from harness.topology.env import run_timeout

# torch 2.13 renamed these two and warns about the old names; torch 2.11 has only the old ones.
_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
gather_single = dist.all_gather_single if _HAS_NEW_NAMES else dist.all_gather_into_tensor
scatter_single = dist.reduce_scatter_single if _HAS_NEW_NAMES else dist.reduce_scatter_tensor


class SharedMemory(Protocol):
    """Shared memory of a group's ranks, with collectives like the functions of this module.

    With `out`, a method fills and returns that tensor; `start_...` methods begin and return a function that waits.
    """

    def all_reduce(
        self, x: Tensor, operation: Callable[..., Tensor] = torch.add, out: Tensor | None = None
    ) -> Tensor: ...
    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]: ...
    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...
    def start_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]: ...
    def start_all_to_all(self, x: Tensor, sizes: Sequence[Sequence[int]]) -> Callable[[], Tensor]: ...
    def mean_of_parts(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    def close(self) -> None: ...


OpenMemory: TypeAlias = Callable[[dist.ProcessGroup, timedelta], SharedMemory | None]
"""Opens a group's shared memory; returns None on all ranks without one. All ranks call it within the timeout."""

_OPEN: dict[tuple[int, ...], SharedMemory] = {}
"""Shared memory by ranks rather than by group, because DeepSpeed creates its own groups of the same ranks."""


def share_memory(groups: Iterable[dist.ProcessGroup | None], open_memory: OpenMemory) -> None:
    """Open shared memory for each group whose ranks are on one host.

    All ranks of a group must call it, with their groups in the same order.
    """
    # Groups of the same ranks share one memory.
    for group in {_ranks(group): group for group in groups if group is not None}.values():
        # A failed run may have left notes unread in its memory.
        if (earlier := _OPEN.pop(_ranks(group), None)) is not None:
            earlier.close()
        if (memory := open_memory(group, run_timeout())) is not None:
            _OPEN[_ranks(group)] = memory


def leave_memory() -> None:
    while _OPEN:
        _OPEN.popitem()[1].close()


def shares_memory(group: dist.ProcessGroup | None) -> bool:
    return group is not None and _ranks(group) in _OPEN


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce `x` into a new tensor."""
    if (memory := memory_of(x, group)) is not None:
        return memory.all_reduce(x)
    total = _copy(x)
    dist.all_reduce(total, group=group)
    return total


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin `all_reduce`; return a function that waits for the sum. Until then `x` must not change."""
    if (memory := memory_of(x, group)) is not None:
        return memory.start_all_reduce(x)
    total = _copy(x)
    return _ended(dist.all_reduce(total, group=group, async_op=True), total)


def all_reduce_in_place(x: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce a contiguous `x` in place."""
    if (memory := memory_of(x, group)) is not None:
        memory.all_reduce(x, out=x)
    else:
        dist.all_reduce(x, group=group)


def all_reduce_max(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce `x` by the elementwise maximum into a new tensor."""
    if (memory := memory_of(x, group)) is not None:
        return memory.all_reduce(x, torch.maximum)
    found = _copy(x)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """All-gather `x` [n, ...], of the same shape on all ranks; return one tensor per rank, in rank order."""
    if (memory := memory_of(x, group)) is not None:
        return memory.all_gather(x).unbind()
    whole = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    gather_single(whole, x.contiguous(), group=group)
    return whole.view(-1, *x.shape).unbind()


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin a reduce-scatter of `x` [n, ...]; return a function that waits for this rank's shard [n / ranks, ...].

    Until then `x` must not change.
    """
    if (memory := memory_of(x, group)) is not None:
        return memory.start_reduce_scatter(x)
    total = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    x = x.contiguous()
    return _ended(scatter_single(total, x, group=group, async_op=True), total, x)


def start_all_to_all(x: Tensor, sizes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin an all-to-all of rows; return a function that waits for the rows [m, ...] from all ranks, in rank order.

    Args:
        x: rows [n, ...] for all ranks, sorted by rank; it must not change until that function has returned.
        sizes: rank i sends `sizes[i][j]` rows to rank j.
    """
    if (memory := memory_of(x, group)) is not None:
        return memory.start_all_to_all(x, sizes)
    rank = dist.get_rank(group)
    received = [row[rank] for row in sizes]
    x = x.contiguous()
    arriving = x.new_empty((sum(received), *x.shape[1:]))
    work = dist.all_to_all_single(arriving, x, received, list(sizes[rank]), group=group, async_op=True)
    return _ended(work, arriving, x)


def memory_of(x: Tensor, group: dist.ProcessGroup | None) -> SharedMemory | None:
    # Asked at every collective, so the cheap conditions come first.
    return _OPEN.get(_ranks(group)) if _OPEN and group is not None and x.device.type == "cpu" else None


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _ended(work: dist.Work | None, total: Tensor, *_sent: Tensor) -> Callable[[], Tensor]:
    """Return a function that waits for `work` and returns `total`; it keeps the sent tensors alive until then."""

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return total

    return wait


def _copy(x: Tensor) -> Tensor:
    # torch.distributed reduces in place and takes only contiguous tensors, but a tensor of the graph must not change.
    return x.detach().clone(memory_format=torch.contiguous_format)
