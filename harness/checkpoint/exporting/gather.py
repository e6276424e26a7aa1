"""Whole tensors, where they are needed in one piece: gathered from the ranks that hold parts of them, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from harness.deepspeed.zero3_parameters import is_partitioned, unpartitioned_size
from harness.parallel.memory import malloc_trim
from harness.parallel.tensor.shard import shard_of
from harness.topology.agreement import values_of_all
from harness.topology.groups import Groups

MANY = 100_000  # values; what fewer of them leave behind when they are freed is not worth a call


def gather_zero3(tensors: Sequence[Tensor]) -> ExitStack:
    """Under ZeRO-3 the whole of parameters that are spread over the data group, while the context lasts."""
    stack = ExitStack()
    spread = [tensor for tensor in tensors if is_partitioned(tensor)]
    if spread:
        if unpartitioned_size(spread) >= MANY:
            stack.callback(malloc_trim)
        stack.enter_context(deepspeed.zero.GatheredParameters(spread))
    return stack


def gather_tp(local: Tensor, groups: Groups) -> Tensor:
    """Return the whole tensor, on the first rank of the tensor-parallel group (elsewhere the shard); all of them call
    it."""
    shard, local = shard_of(local), local.detach()
    if shard is None or groups.tp_group is None:
        return local
    ranks = dist.get_process_group_ranks(groups.tp_group)
    first = groups.rank == ranks[0]
    shards = values_of_all(shard, groups.tp_group)
    sizes = [prod(piece.local_shape) for piece in shards]
    flat = functional.pad(local.flatten(), (0, max(sizes) - local.numel()))  # a gather wants one size on all ranks
    parts = [torch.empty_like(flat) for _ in ranks] if first else None
    dist.gather(flat, parts, dst=ranks[0], group=groups.tp_group)
    if parts is None:
        return local
    whole = local.new_empty(shard.full_shape)
    for part, piece, size in zip(parts, shards, sizes, strict=True):
        piece.put(part[:size].view(piece.local_shape), whole)
    return whole
