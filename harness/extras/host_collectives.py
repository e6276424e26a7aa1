"""Carry the collectives of CPU ranks, the harness's own and DeepSpeed's, through memory of their host.

That is several times as fast as gloo. Groups with ranks on several hosts use torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from harness.deepspeed.collectives import carry_collectives
from harness.extras.host_memory import HostMemory
from harness.parallel.collectives import memory_of, share_memory
from harness.topology.groups import Groups


def carry_on_host(groups: Groups) -> None:
    """Open shared memory for each group whose ranks are on one host, until `leave_memory`; all ranks call it."""
    share_memory([groups.tp_group, groups.dp_group, groups.cp_group, groups.ep_group], HostMemory.open)
    carry_collectives(all_reduce_in_memory, all_gather_in_memory, reduce_scatter_in_memory, means_in_memory)


def all_reduce_in_memory(x: Tensor, group: dist.ProcessGroup | None) -> bool:
    """All-reduce `x` in place through shared memory; return False, on all ranks alike, if that is impossible."""
    # DeepSpeed passes None for the group of all ranks.
    memory = None if not x.is_contiguous() else memory_of(x, group or dist.group.WORLD)
    return memory is not None and memory.all_reduce(x, out=x) is x


def all_gather_in_memory(whole: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> bool:
    """All-gather `x` [...] into `whole`, [ranks, ...] or flat; return False as `all_reduce_in_memory` does."""
    memory = None if not whole.is_contiguous() else memory_of(x, group or dist.group.WORLD)
    return memory is not None and memory.all_gather(x, out=whole) is whole


def reduce_scatter_in_memory(shard: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Reduce-scatter `x` [n, ...] into `shard` [n / ranks, ...]; return False as `all_reduce_in_memory` does."""
    memory = None if not shard.is_contiguous() else memory_of(x, group or dist.group.WORLD)
    return memory is not None and memory.reduce_scatter(x, out=shard) is shard


def means_in_memory(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor] | None:
    """Reduce-scatter each tensor to its mean through shared memory; None if that is impossible.

    The tensors must be contiguous and of one dtype. A shard is flat, [elements / ranks, rounded up].
    """
    memory = memory_of(tensors[0], group or dist.group.WORLD)
    return None if memory is None else memory.mean_of_parts(tensors)
