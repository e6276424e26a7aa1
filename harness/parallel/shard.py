"""Which part of a tensor a rank keeps.

A cut parameter carries a `Shard` as `param.shard`: the shape of the whole tensor, as HuggingFace stores it,
and the index ranges along one dimension that the local tensor holds. Loading, initialising and exporting ask
this record and never a name. A parameter without one is whole on every rank.

The record lives on the Parameter object: whoever puts a new Parameter in the place of one (a meta tensor that
is materialised, say) hands it on with `mark(new, old.shard)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a tensor of shape `full_shape` that one rank holds, cut along `dim`.

    `pieces` are (start, stop) ranges along `dim`, in the order in which the local tensor holds them;
    `padding` rows of zeros, which belong to no index of the whole, follow the last one. `owner` is False on a
    rank whose pieces another, lower rank holds as well: such a copy is neither exported nor counted in a
    norm.
    """

    full_shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]
    padding: int = 0
    owner: bool = True

    @property
    def length(self) -> int:
        """The local size along `dim`, padding included."""
        return sum(stop - start for start, stop in self.pieces) + self.padding

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])

    def take(self, full: Any) -> Tensor:
        """The local tensor, cut from the whole: a tensor, or what safetensors' `get_slice` returns, of which
        only the pieces are read. Always a new tensor. Raises ValueError on another shape."""
        shape = tuple(full.get_shape() if hasattr(full, "get_shape") else full.shape)
        if shape != self.full_shape:
            raise ValueError(f"a tensor of shape {shape} stands where {self.full_shape} is expected")
        parts = [full[self._index(start, stop)] for start, stop in self.pieces]
        if self.padding or not parts:
            like = parts[0] if parts else full[self._index(0, 1)]
            shape = (*self.full_shape[: self.dim], self.padding, *self.full_shape[self.dim + 1 :])
            parts.append(like.new_zeros(shape))
        return torch.cat(parts, dim=self.dim)

    def read_into(self, local: Tensor, full: Any) -> None:
        """Fill the local tensor from the whole, piece by piece: as `take`, without a second copy in memory."""
        offset = 0
        for start, stop in self.pieces:
            local.narrow(self.dim, offset, stop - start).copy_(full[self._index(start, stop)])
            offset += stop - start
        local.narrow(self.dim, offset, self.padding).zero_()

    def put(self, local: Tensor, full: Tensor) -> None:
        """Write the local tensor's rows, without the padding, to their places in the whole."""
        offset = 0
        for start, stop in self.pieces:
            full[self._index(start, stop)] = local.narrow(self.dim, offset, stop - start)
            offset += stop - start

    def _index(self, start: int, stop: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(start, stop))


def share_of(full_shape: tuple[int, ...], dim: int, rank: int, size: int, *, parts: int = 1, copies: int = 1) -> Shard:
    """The shard of one of `size` ranks: an equal share of every one of `parts` equal stretches of `dim`.

    With `copies`, that many neighbouring ranks hold the same share. Raises ValueError where it does not
    divide.
    """
    dim = dim % len(full_shape)
    stretch, shares = full_shape[dim] // parts, size // copies
    if full_shape[dim] % parts or size % copies or stretch % shares:
        raise ValueError(f"dimension {dim} of {full_shape} cannot be cut: {parts=}, {size=}, {copies=}")
    width, index = stretch // shares, rank // copies
    pieces = tuple((part * stretch + index * width, part * stretch + (index + 1) * width) for part in range(parts))
    return Shard(full_shape=full_shape, dim=dim, pieces=pieces, owner=rank % copies == 0)


def padded_share_of(full_shape: tuple[int, ...], dim: int, rank: int, size: int) -> Shard:
    """The shard of one of `size` ranks where `dim` is padded with zeros, at its end, until the size divides
    it."""
    dim = dim % len(full_shape)
    total = full_shape[dim]
    width = -(-total // size)
    start, stop = min(rank * width, total), min((rank + 1) * width, total)
    pieces = ((start, stop),) if stop > start else ()
    return Shard(full_shape=full_shape, dim=dim, pieces=pieces, padding=width - (stop - start))


def cut_parameter(param: nn.Parameter, shard: Shard) -> nn.Parameter:
    """A new parameter with this rank's part of `param`, on the same device (meta too), marked."""
    with torch.no_grad():
        local = shard.take(param.detach())
    return mark(nn.Parameter(local, requires_grad=param.requires_grad), shard)


def mark(param: nn.Parameter, shard: Shard | None) -> nn.Parameter:
    """Set `param.shard`, and `param.tensor_model_parallel`, by which DeepSpeed's gradient norm tells what to
    count on this rank besides tensor-parallel rank 0: here, the shards that are no copies. None: the
    parameter is whole."""
    if shard is not None:
        param.shard = shard  # type: ignore[attr-defined]
        param.tensor_model_parallel = shard.owner  # type: ignore[attr-defined]
    return param


def shard_of(param: Tensor) -> Shard | None:
    """The parameter's shard; None where it is whole on every rank."""
    return getattr(param, "shard", None)


def without_dim(shard: Shard) -> Shard:
    """The shard of the bias that belongs to a weight: the same pieces of its one dimension."""
    return replace(shard, full_shape=(shard.full_shape[shard.dim],), dim=0)
