"""Gather whole matrices for an optimizer that ZeRO gives only flat partitions.

ZeRO passes an optimizer flat tensors with this rank's elements of many parameters, one after the other. Tensor
parallelism has sharded the parameters before that. A `MatrixPart` knows where the elements of one matrix lie, gathers
the whole matrix from all ranks that hold elements of it, and extracts this rank's elements from a whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from harness.deepspeed.flat_tensors import (
    EngineOptimizer,
    PerParameterPartition,
    UpdatedTensor,
    parameter_slices,
    updated_tensors,
)
from harness.parallel.tensor.shard import Shard, shard_of
from harness.topology.agreement import all_gather_object

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """The elements of one matrix in a flat tensor of this rank.

    Attributes:
        shape: shape of the matrix, or of this rank's tensor-parallel shard of it.
        start: index of this rank's first element in the flattened matrix or shard.
        length: number of elements on this rank.
        offset: index of the first of them in the flat tensor.
        group: data-parallel ranks that partition the flat tensor; None if it is not partitioned.
        split: whether the ranks of `group` exchange their elements of the matrix.
        needed: whether this rank needs the whole matrix, because it or a peer updates elements of it.
        device: device for collectives.
        shards: the shards of all tensor-parallel ranks; empty for a replicated matrix.
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
        """This rank's elements in the flat tensor."""
        return slice(self.offset, self.offset + self.length)

    def whole(self, flat: Tensor) -> Tensor | None:
        """Gather the whole matrix [..., rows, columns] from all ranks' `flat` tensors [n]; None if not needed.

        All ranks that hold elements must call this in the same order.
        """
        local = flat[self.place].to(self.device)
        if self.group is not None and self.split:
            filled = local.new_zeros(prod(self.shape))
            filled[self.start : self.start + self.length] = local
            dist.all_reduce(filled, group=self.group)  # each element comes from one rank, so the sum is exact
            local = filled
        if not self.needed:  # only after the all-reduce, in which the other ranks need this rank's elements
            return None
        return self._joined(local) if self.shards else local.view(self.shape)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's elements, flat [n], of a whole matrix [..., rows, columns]."""
        local = whole
        if self.shards:
            local = whole.new_empty(self.shape)
            self.shards[dist.get_rank(self.tensor)].read_into(local, whole)
        return local.reshape(-1)[self.start : self.start + self.length]

    def _joined(self, local: Tensor) -> Tensor:
        """Return the whole matrix, gathered from the shards of all tensor-parallel ranks."""
        sizes = [prod(shard.local_shape) for shard in self.shards]
        padded = functional.pad(local, (0, max(sizes) - local.numel()))  # an all-gather needs equal sizes
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.tensor)
        whole = local.new_zeros(self.shards[0].full_shape)
        for part, shard, size in zip(parts, self.shards, sizes, strict=True):
            shard.put(part[:size].view(shard.local_shape), whole)
        return whole


def locate_matrices(
    optimizer: EngineOptimizer, chosen: Sequence[int], tensor: Group | None, device: torch.device
) -> dict[Tensor, list[MatrixPart]]:
    """Return the matrix parts in each tensor that is updated for the parameter groups `chosen`.

    All ranks of the tensor-parallel group must call this. `optimizer` is the engine's, which wraps torch's.
    """
    updated = ((each.tensor, list(_parts(each, device))) for each in updated_tensors(optimizer, chosen))
    return {flat: _with_shards(parts, tensor) for flat, parts in updated}


def _parts(updated: UpdatedTensor, device: torch.device) -> Iterator[tuple[Tensor, MatrixPart]]:
    """Yield each parameter in a tensor that the optimizer updates, with its part."""
    for local in parameter_slices(updated):
        part = MatrixPart(
            shape=local.shape,
            start=local.start,
            length=local.length,
            offset=local.offset,
            group=local.group,
            split=local.split,
            needed=local.length > 0 or isinstance(updated, PerParameterPartition),
            device=device,
        )
        yield local.parameter, part


def _with_shards(located: list[tuple[Tensor, MatrixPart]], tensor: Group | None) -> list[MatrixPart]:
    """Return the parts with the shards of all tensor-parallel ranks.

    If shards have unequal sizes, ZeRO partitions the ranks' flat tensors at different places, and a rank may need a
    matrix that its tensor-parallel peer does not. Then all ranks gather every matrix, so that no rank waits forever.
    """
    if tensor is None:
        return [part for _, part in located]
    mine = [(part.shape, shard_of(parameter)) for parameter, part in located]
    of_all = all_gather_object(mine, tensor)
    unequal = len({tuple(shape for shape, _ in theirs) for theirs in of_all}) > 1
    parts = []
    for index, (_, part) in enumerate(located):
        shards = tuple(shard for theirs in of_all if (shard := theirs[index][1]) is not None)
        if shards:
            part = replace(part, shards=shards, tensor=tensor)
        parts.append(replace(part, split=True, needed=True) if unequal else part)
    return parts
