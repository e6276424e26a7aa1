"""Which part of a tensor a rank keeps.

A cut parameter carries a `Shard` as `param.shard`: the shape of the whole tensor, as HuggingFace stores it,
and the index ranges along one dimension that the local tensor holds. Loading, initialising and exporting ask
this record and never a name. A parameter without one is whole on every rank.

The record lives on the Parameter object: whoever puts a new Parameter in the place of one (a meta tensor that
is materialised, say) hands it on with `mark(new, old.shard)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harness.config.model.shares import Stretch, stretch


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a tensor of shape `full_shape` that one rank holds, cut along `dim`.

    `pieces` are (start, stop) ranges along `dim`, in the order in which the local tensor holds them;
    `padding` rows of zeros, which belong to no index of the whole, follow each of them. `owner` is False on a
    rank whose pieces another, lower rank holds as well: such a copy is neither exported nor counted in a
    norm. `widths` says how many entries of the whole each rank of the group holds, in rank order.
    """

    full_shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]
    padding: int = 0
    owner: bool = True
    widths: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The local size along `dim`, padding included."""
        return sum(stop - start + self.padding for start, stop in self.pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])

    @property
    def copied(self) -> bool:
        """Whether some entries of the whole are held by several ranks."""
        return sum(self.widths) > self.full_shape[self.dim]

    @property
    def unequal(self) -> bool:
        """Whether some ranks hold more than others."""
        return len(set(self.widths)) > 1

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Start and stop of each piece, and where it starts in the local tensor."""
        offset = 0
        for start, stop in self.pieces:
            yield start, stop, offset
            offset += stop - start + self.padding

    def take(self, full: Tensor) -> Tensor:
        """Return the local tensor, cut from the whole: always a new tensor. Raises ValueError on another shape."""
        shape = tuple(full.shape)
        if shape != self.full_shape:
            raise ValueError(f"got a tensor of shape {shape}, expected {self.full_shape}")
        parts = []
        for start, stop in self.pieces:
            part = full[self._index(start, stop)]
            parts.append(part)
            if self.padding:
                zeros = (*self.full_shape[: self.dim], self.padding, *self.full_shape[self.dim + 1 :])
                parts.append(part.new_zeros(zeros))
        return torch.cat(parts, dim=self.dim)

    def read_into(self, local: Tensor, full: Tensor) -> None:
        """Fill the local tensor from the whole, piece by piece: as `take`, without a second copy in memory."""
        for start, stop, offset in self.spans():
            local.narrow(self.dim, offset, stop - start).copy_(full[self._index(start, stop)])
            local.narrow(self.dim, offset + stop - start, self.padding).zero_()

    def put(self, local: Tensor, full: Tensor) -> None:
        """Write the local tensor's rows, without the padding, to their places in the whole."""
        for start, stop, offset in self.spans():
            full[self._index(start, stop)] = local.narrow(self.dim, offset, stop - start)

    def _index(self, start: int, stop: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(start, stop))


def share_of(
    full_shape: tuple[int, ...],
    dim: int,
    rank: int,
    size: int = 1,
    *,
    parts: int = 1,
    stretches: Sequence[Stretch] | None = None,
    multiple: int = 1,
) -> Shard:
    """Return the shard of one rank: its stretch of every one of `parts` equal parts of `dim`.

    `stretches` are those of all ranks in one part, which neighbours may share; by default each of `size` ranks has its
    own, the first ones an entry more where the size does not divide. Zeros fill each piece to a `multiple`. Raises
    ValueError where the parts are not equal, or a rank would have nothing.
    """
    dim = dim % len(full_shape)
    part, left = divmod(full_shape[dim], parts)
    if stretches is None:
        stretches = [stretch(part, index, size) for index in range(size)]
    widths = tuple((stop - start) * parts for start, stop in stretches)
    if left or not min(widths):
        raise ValueError(f"dimension {dim} of {full_shape} cannot be cut: {parts=}, size={len(stretches)}")
    start, stop = stretches[rank]
    return Shard(
        full_shape=full_shape,
        dim=dim,
        pieces=tuple((index * part + start, index * part + stop) for index in range(parts)),
        padding=-(stop - start) % multiple,
        owner=(start, stop) not in stretches[:rank],
        widths=widths,
    )


def cut_parameter(param: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Return a new parameter with this rank's part of `param`, on the same device (meta too), marked."""
    with torch.no_grad():
        local = shard.take(param.detach())
    return mark(nn.Parameter(local, requires_grad=param.requires_grad), shard)


def mark(param: nn.Parameter, shard: Shard | None) -> nn.Parameter:
    """Set `param.shard`, and `param.tensor_model_parallel`, by which DeepSpeed's gradient norm tells what to
    count on this rank besides tensor-parallel rank 0: here, the shards that are no copies. None: the
    parameter is whole."""
    if shard is not None:
        param.shard = shard  # type: ignore[attr-defined]  # a parameter takes any attribute
        param.tensor_model_parallel = shard.owner  # type: ignore[attr-defined]  # likewise
    return param


def shard_of(param: Tensor) -> Shard | None:
    """Return the parameter's shard; None where it is whole on every rank."""
    return getattr(param, "shard", None)


def without_dim(shard: Shard) -> Shard:
    """Return the shard of the bias that belongs to a weight: the same pieces of its one dimension."""
    return replace(shard, full_shape=(shard.full_shape[shard.dim],), dim=0)
