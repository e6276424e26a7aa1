"""Collectives over a process group: by torch.distributed, or for CPU tensors through memory that its ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from harness.topology.env import run_timeout

# torch 2.13 has renamed these two and warns about the old names; torch 2.11 has only the old ones
_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
gather_single = dist.all_gather_single if _HAS_NEW_NAMES else dist.all_gather_into_tensor
scatter_single = dist.reduce_scatter_single if _HAS_NEW_NAMES else dist.reduce_scatter_tensor


class SharedMemory(Protocol):
    """The memory that the ranks of a group share, and its collectives; see the functions of this module.

    With `out`, a method fills and returns that tensor; `start_...` begin, and return a function that completes.
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
"""Opens the memory of a group, all of whose ranks call it within the time; None on all of them if they share none."""

_OPEN: dict[tuple[int, ...], SharedMemory] = {}
"""Shared memory by the ranks that share it, not by group: DeepSpeed makes groups of its own of the same ranks."""


def share_memory(groups: Iterable[dist.ProcessGroup | None], open_memory: OpenMemory) -> None:
    """Open shared memory for each of these groups whose ranks are on one host.

    All ranks of a group must call it, with their groups in the same order.
    """
    for group in {_ranks(group): group for group in groups if group is not None}.values():  # once per set of ranks
        if (earlier := _OPEN.pop(_ranks(group), None)) is not None:  # a failed run may have left notes unread
            earlier.close()
        if (memory := open_memory(group, run_timeout())) is not None:
            _OPEN[_ranks(group)] = memory


def leave_memory() -> None:
    """Close all shared memory."""
    while _OPEN:
        _OPEN.popitem()[1].close()


def shares_memory(group: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks of `group` share memory."""
    return group is not None and _ranks(group) in _OPEN


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` (any shape) over the group, in a new tensor."""
    if (memory := _memory(x, group)) is not None:
        return memory.all_reduce(x)
    total = _copy(x)
    dist.all_reduce(total, group=group)
    return total


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin `all_reduce`; return a function that waits for the sum. Until then `x` (any shape) may not change."""
    if (memory := _memory(x, group)) is not None:
        return memory.start_all_reduce(x)
    total = _copy(x)
    return _ended(dist.all_reduce(total, group=group, async_op=True), total)


def all_reduce_in_place(x: Tensor, group: dist.ProcessGroup) -> None:
    """Replace `x` (any shape), which must be contiguous, by its sum over the group."""
    if (memory := _memory(x, group)) is not None:
        memory.all_reduce(x, out=x)
    else:
        dist.all_reduce(x, group=group)


def all_reduce_max(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the elementwise maximum of `x` (any shape) over the group, in a new tensor."""
    if (memory := _memory(x, group)) is not None:
        return memory.all_reduce(x, torch.maximum)
    found = _copy(x)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Return the tensors `x` [n, ...] of all ranks of the group, which must have the same shape, in rank order."""
    if (memory := _memory(x, group)) is not None:
        return memory.all_gather(x).unbind()
    whole = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    gather_single(whole, x.contiguous(), group=group)
    return whole.view(-1, *x.shape).unbind()


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin a reduce-scatter of `x` [n, ...]; return a function that waits for this rank's share [n / ranks, ...] of
    the sum. Until then `x` may not change."""
    if (memory := _memory(x, group)) is not None:
        return memory.start_reduce_scatter(x)
    total, x = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:])), x.contiguous()
    return _ended(scatter_single(total, x, group=group, async_op=True), total, x)


def start_all_to_all(x: Tensor, sizes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin an all-to-all of rows; return a function that waits for the rows [m, ...] from all ranks, in rank order.

    Args:
        x: rows [n, ...] for all ranks, sorted by rank; it may not change until that function has returned.
        sizes: rank i sends `sizes[i][j]` rows to rank j.
    """
    if (memory := _memory(x, group)) is not None:
        return memory.start_all_to_all(x, sizes)
    rank = dist.get_rank(group)
    received, x = [row[rank] for row in sizes], x.contiguous()
    arriving = x.new_empty((sum(received), *x.shape[1:]))
    work = dist.all_to_all_single(arriving, x, received, list(sizes[rank]), group=group, async_op=True)
    return _ended(work, arriving, x)


def all_reduce_in_memory(x: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Replace `x` (any shape) by its sum over the group, through shared memory only; return False if it cannot.

    This and the next three functions are for `carry_collectives`: all ranks of a group decide alike.
    """
    memory = None if not x.is_contiguous() else _memory(x, group or dist.group.WORLD)
    return memory is not None and memory.all_reduce(x, out=x) is x


def all_gather_in_memory(whole: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Fill `whole`, [ranks, ...] or flat, with the tensors `x` [...] of all ranks.

    Return True or False as `all_reduce_in_memory` does.
    """
    memory = None if not whole.is_contiguous() else _memory(x, group or dist.group.WORLD)
    return memory is not None and memory.all_gather(x, out=whole) is whole


def reduce_scatter_in_memory(share: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Fill `share` [n / ranks, ...] with this rank's share of the sum of `x` [n, ...].

    Return True or False as `all_reduce_in_memory` does.
    """
    memory = None if not share.is_contiguous() else _memory(x, group or dist.group.WORLD)
    return memory is not None and memory.reduce_scatter(x, out=share) is share


def means_in_memory(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor] | None:
    """Return this rank's part of the mean of each tensor over the group, through shared memory only; None if it cannot.

    The tensors (any shape) must be contiguous and of one dtype. A part is flat, [elements / ranks, rounded up].
    """
    memory = _memory(tensors[0], group or dist.group.WORLD)
    return None if memory is None else memory.mean_of_parts(tensors)


def _memory(x: Tensor, group: dist.ProcessGroup | None) -> SharedMemory | None:
    return _OPEN.get(_ranks(group)) if _OPEN and group is not None and x.device.type == "cpu" else None


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _ended(work: dist.Work | None, total: Tensor, *_sent: Tensor) -> Callable[[], Tensor]:
    """Return a function that waits for `work` and returns `total`; it keeps the tensors being sent alive until then."""

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return total

    return wait


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
