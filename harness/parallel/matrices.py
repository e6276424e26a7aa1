"""Whole matrices for an optimizer that steps on flat parts of them.

ZeRO hands an optimizer flat tensors: one after the other, this rank's elements of many parameters. Tensor parallelism
cuts the parameters before that. A `MatrixPart` says where the elements of one matrix lie, puts the whole matrix
together from all ranks that hold a part of it, and takes this rank's elements out of a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.nn import functional

from harness.parallel.tensor.shard import Shard, shard_of

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """What a flat tensor of this rank holds of one matrix.

    Attributes:
        shape: of the matrix, or of this rank's tensor-parallel shard of it.
        start: first element of it that is here.
        length: number of its elements that are here.
        offset: where they begin in the flat tensor.
        group: data-parallel ranks over which the flat tensor is spread; None where this rank has all of it.
        split: whether the ranks of `group` exchange their elements of the matrix.
        needed: whether this rank, or one that it works with, updates elements of the matrix.
        device: where ranks exchange tensors.
        shards: of all tensor-parallel ranks; empty where each has the whole matrix.
        tensor: tensor-parallel group.
    """

    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    group: Group | None
    split: bool
    needed: bool
    device: torch.device
    shards: tuple[Shard, ...] = ()
    tensor: Group | None = None

    @property
    def place(self) -> slice:
        """Of this rank's elements in the flat tensor."""
        return slice(self.offset, self.offset + self.length)

    def whole(self, flat: Tensor) -> Tensor | None:
        """Return the whole matrix, whose elements the ranks have in `flat`; None where it is not needed.

        All ranks that hold a part call this in the same order.
        """
        local = flat[self.place].to(self.device)
        if self.group is not None and self.split:
            filled = local.new_zeros(prod(self.shape))
            filled[self.start : self.start + self.length] = local
            dist.all_reduce(filled, group=self.group)  # each element comes from one rank, so the sum is exact
            local = filled
        if not self.needed:
            return None
        return self._joined(local) if self.shards else local.view(self.shape)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's elements of a whole matrix, flat."""
        local = whole
        if self.shards:
            local = whole.new_empty(self.shape)
            self.shards[dist.get_rank(self.tensor)].read_into(local, whole)
        return local.reshape(-1)[self.start : self.start + self.length]

    def _joined(self, local: Tensor) -> Tensor:
        """Return the whole of what tensor-parallel ranks hold shards of."""
        sizes = [prod(shard.local_shape) for shard in self.shards]
        padded = functional.pad(local, (0, max(sizes) - local.numel()))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.tensor)
        whole = local.new_zeros(self.shards[0].full_shape)
        for part, shard, size in zip(parts, self.shards, sizes, strict=True):
            shard.put(part[:size].view(shard.local_shape), whole)
        return whole


def locate_matrices(
    optimizer: Any, chosen: Sequence[int], tensor: Group | None, device: torch.device
) -> dict[Tensor, list[MatrixPart]]:
    """Return the matrix parts in each tensor that the parameter groups `chosen` step on.

    All ranks of the tensor-parallel group call this together. `optimizer` is the engine's, which wraps the one that
    steps.
    """
    return {flat: _with_shards(list(parts), tensor) for flat, parts in _located(optimizer, chosen, device)}


_Located = Iterator[tuple[Tensor, Iterable[tuple[Any, MatrixPart]]]]


def _located(optimizer: Any, chosen: Sequence[int], device: torch.device) -> _Located:
    """Yield the tensors that are stepped on, with the parameters in each and their parts."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index, parameters in enumerate(optimizer.fp16_groups):
            if optimizer.sub_group_to_group_id[index] in chosen:
                yield optimizer.fp32_partitioned_groups_flat[index], _each_divided(parameters, device)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for index in chosen:
            parameters, offsets = optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index]
            flat, group = optimizer.single_partition_of_fp32_groups[index], optimizer.real_dp_process_group[index]
            yield flat, _divided_together(parameters, offsets, flat.numel(), group, device)
    elif isinstance(optimizer, BF16_Optimizer):
        for index in chosen:
            parameters = optimizer.bf16_groups[index]
            offsets = [sum(p.numel() for p in parameters[:at]) for at in range(len(parameters))]
            flat, group = optimizer.fp32_groups_flat_partition[index], optimizer.real_dp_process_group[index]
            yield flat, _divided_together(parameters, offsets, flat.numel(), group, device)
    else:
        for index in chosen:
            for parameter in optimizer.param_groups[index]["params"]:
                yield parameter, [(parameter, _undivided(parameter, device))]


def _undivided(parameter: Tensor, device: torch.device) -> MatrixPart:
    size, shape = parameter.numel(), tuple(parameter.shape)
    return MatrixPart(shape=shape, start=0, length=size, offset=0, group=None, split=False, needed=True, device=device)


def _divided_together(
    parameters: Sequence[Tensor], offsets: Sequence[int], size: int, group: Group, device: torch.device
) -> Iterator[tuple[Tensor, MatrixPart]]:
    """Yield parts of parameters that lie at `offsets` in one tensor, of which each rank of `group` has `size`
    elements."""
    first = dist.get_rank(group) * size
    for parameter, offset in zip(parameters, offsets, strict=True):
        begin = min(max(first, offset), offset + parameter.numel())
        end = max(min(first + size, offset + parameter.numel()), begin)
        is_split = offset // size != (offset + parameter.numel() - 1) // size
        yield (
            parameter,
            MatrixPart(
                shape=tuple(parameter.shape),
                start=begin - offset,
                length=end - begin,
                offset=begin - first if end > begin else 0,
                group=group,
                split=is_split,
                needed=end > begin,
                device=device,
            ),
        )


def _each_divided(parameters: Sequence[Any], device: torch.device) -> Iterator[tuple[Tensor, MatrixPart]]:
    """Yield parts of parameters of which ZeRO-3 has given every rank an equal share."""
    offset = 0
    for parameter in parameters:
        group, size = parameter.ds_process_group, parameter.partition_numel()
        begin = min(dist.get_rank(group) * size, parameter.ds_numel)
        length = min(size, parameter.ds_numel - begin)
        part = MatrixPart(
            shape=tuple(parameter.ds_shape),
            start=begin,
            length=length,
            offset=offset,
            group=group,
            split=dist.get_world_size(group) > 1,
            needed=True,
            device=device,
        )
        yield parameter, part
        offset += size


def _with_shards(located: list[tuple[Any, MatrixPart]], tensor: Group | None) -> list[MatrixPart]:
    """Return the parts with the shards of all tensor-parallel ranks.

    Where these are of unequal sizes, they lie differently in the flat tensors of their ranks: then every rank takes
    part in every matrix.
    """
    if tensor is None:
        return [part for _, part in located]
    mine = [(part.shape, shard_of(parameter)) for parameter, part in located]
    of_all: list[Any] = [None] * dist.get_world_size(tensor)
    dist.all_gather_object(of_all, mine, group=tensor)
    unequal = len({tuple(shape for shape, _ in theirs) for theirs in of_all}) > 1
    parts = []
    for index, (_, part) in enumerate(located):
        shards = tuple(theirs[index][1] for theirs in of_all)
        if shards[0] is not None:
            part = replace(part, shards=shards, tensor=tensor)
        parts.append(replace(part, split=True, needed=True) if unequal else part)
    return parts
