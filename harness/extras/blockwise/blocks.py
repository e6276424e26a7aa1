"""Where the blocks of an 8-bit optimizer state lie in the tensors of a rank.

bitsandbytes quantises a state in blocks of 256 elements, each with one scale. Blocks are counted from the first element
of a parameter. ZeRO and tensor parallelism may cut a block: then the ranks that hold its elements share its scale, so
every layout has the blocks, and the codes, of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from harness.deepspeed.flat_tensors import ParameterSlice
from harness.parallel.tensor.shard import Shard, shard_of

BLOCK = 256
"""Elements of a block, as in the kernels of bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """Elements of one parameter that lie one after the other in a tensor that the optimizer updates.

    Attributes:
        name: the parameter.
        place: the elements in the flat tensor.
        size: number of elements of the whole parameter.
        start: index of the first element in this rank's flattened shard of the parameter.
        shard: position of that shard in the whole parameter; None if it is whole.
        is_cut: whether other ranks hold elements of the same blocks.
    """

    name: str
    place: slice
    size: int
    start: int
    shard: Shard | None
    is_cut: bool

    @property
    def length(self) -> int:
        """Number of elements."""
        return int(self.place.stop - self.place.start)

    def indices(self, device: torch.device) -> Tensor:
        """Return the index [length] of each element in the flattened whole parameter."""
        local = torch.arange(self.start, self.start + self.length, device=device)
        if self.shard is None:
            return local
        dim, shape = self.shard.dim, self.shard.full_shape
        inner = prod(shape[dim + 1 :])
        row = local // (self.shard.length * inner)
        rest = local % (self.shard.length * inner)
        along = torch.cat([torch.arange(start, stop, device=device) for start, stop, _ in self.shard.spans()])
        return (row * shape[dim] + along[rest // inner]) * inner + rest % inner

    def cells(self, device: torch.device) -> Cells:
        """Return the place of each element in its block, for the blocks that this piece has elements of."""
        indices = self.indices(device)
        blocks, number = torch.unique(indices // BLOCK, return_inverse=True)
        return Cells(blocks=blocks, places=number * BLOCK + indices % BLOCK)


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Blocks of a parameter of which this rank may lack elements.

    Attributes:
        blocks: index [n] of each block in the whole parameter.
        places: place of each element of the piece in these blocks, one after the other.
    """

    blocks: Tensor
    places: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Return values [..., length] at their places in the blocks [..., n * BLOCK], with zeros elsewhere."""
        whole = values.new_zeros(*values.shape[:-1], len(self.blocks) * BLOCK)
        whole[..., self.places] = values
        return whole

    @cached_property
    def lacking(self) -> tuple[Tensor, Tensor]:
        """The blocks that other ranks hold elements of, and the first place in each of them that is not this rank's."""
        is_free = torch.ones(len(self.blocks) * BLOCK, dtype=torch.bool, device=self.places.device)
        is_free[self.places] = False
        is_free = is_free.view(-1, BLOCK)
        incomplete = is_free.any(dim=1).nonzero().view(-1)
        return incomplete, incomplete * BLOCK + is_free[incomplete].int().argmax(dim=1)


def pieces_of(name: str, local: ParameterSlice, least: int) -> Iterator[StatePiece]:
    """Yield the pieces of a parameter's slice: whole blocks, and the elements of blocks that are cut.

    Args:
        least: number of elements from which a parameter's states have blocks; smaller ones are one piece.
    """
    shard = shard_of(local.parameter)
    size = prod(local.shape if shard is None else shard.full_shape)

    def piece(start: int, stop: int, *, is_cut: bool) -> StatePiece:
        offset = local.offset - local.start
        return StatePiece(
            name=name, place=slice(offset + start, offset + stop), size=size, start=start, shard=shard, is_cut=is_cut
        )

    start = local.start
    stop = local.start + local.length
    if start == stop:
        return
    if size < least:
        yield piece(start, stop, is_cut=False)
        return
    before = _elements_before(shard)
    if before is None:
        yield piece(start, stop, is_cut=not _has_whole_blocks(shard, start, stop))
        return
    first = min(start + -(before + start) % BLOCK, stop)
    last = stop if before + stop == size else max(stop - (before + stop) % BLOCK, first)
    for begin, end, is_cut in ((start, first, True), (first, last, False), (last, stop, True)):
        if begin < end:
            yield piece(begin, end, is_cut=is_cut)


def _elements_before(shard: Shard | None) -> int | None:
    """Return the number of elements before a shard in the whole parameter; None if it is not one run of elements."""
    if shard is None:
        return 0
    if len(shard.pieces) > 1 or prod(shard.full_shape[: shard.dim]) > 1:
        return None
    return shard.pieces[0][0] * prod(shard.full_shape[shard.dim + 1 :])


def _has_whole_blocks(shard: Shard | None, start: int, stop: int) -> bool:
    """Return whether the runs of elements `start` to `stop` of a shard of several runs all consist of whole blocks."""
    assert shard is not None
    inner = prod(shard.full_shape[shard.dim + 1 :])
    ends = [shard.full_shape[shard.dim], *(end for piece in shard.pieces for end in piece)]
    return start % BLOCK == stop % BLOCK == 0 and all(end * inner % BLOCK == 0 for end in ends)
