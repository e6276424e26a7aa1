"""Tensor-parallel shards: the part of a tensor that a rank holds.

A sharded parameter carries a `Shard` as `param.shard`: the shape of the whole tensor, as HuggingFace stores it, and the
index ranges along one dimension that the local tensor holds. Loading, initialising and exporting use this record, never
a parameter's name. A parameter without one is replicated.

The record is an attribute of the Parameter object. Code that replaces a Parameter (for example, one on the meta device
by a materialised one) must pass it on with `mark(new, old.shard)`.

Some weights hold several segments of unequal width side by side: query, key and value of grouped attention; gate,
inputs, states and time steps of a state-space mixer. A rule gives the width of each as a product, as in
"num_key_value_heads * head_dim". The first factor is the number of units (heads, groups, channels) that ranks share,
the rest is the width of one. Names are attributes of the module that owns the weight, or of a module around it. If
there are fewer units than ranks, neighbouring ranks use the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.model.sharding import Range, shard_range
from harness.errors import UserError
from harness.parallel.comm import TensorParallel, copy_to_group, gather_from_group
from harness.wording import one_of


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a tensor that one rank holds.

    Attributes:
        full_shape: shape of the whole tensor.
        dim: split dimension.
        pieces: (start, stop) ranges along `dim`, in the order of the local tensor.
        padding: rows of zeros after each piece, which belong to no index of the whole tensor.
        owner: False if a lower rank holds the same pieces; such a copy is neither exported nor counted in a norm.
        widths: each rank's number of entries of the whole tensor, in rank order.
        over_data: whether other pieces are also on data-parallel ranks (whole experts), not only on ranks of the
            tensor-parallel group.
    """

    full_shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]
    padding: int = 0
    owner: bool = True
    widths: tuple[int, ...] = ()
    over_data: bool = False

    @property
    def length(self) -> int:
        """The local size along `dim`, padding included."""
        return sum(stop - start + self.padding for start, stop in self.pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])

    @property
    def copied(self) -> bool:
        """Whether several ranks hold the same entries."""
        # Then all ranks together hold more entries than the whole tensor has.
        return sum(self.widths) > self.full_shape[self.dim]

    @property
    def unequal(self) -> bool:
        """Whether some ranks hold more entries than others."""
        # Whole experts over data-parallel ranks are padded to one size.
        return len(set(self.widths)) > 1 and not self.over_data

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield start and stop of each piece, and its start in the local tensor."""
        offset = 0
        for start, stop in self.pieces:
            yield start, stop, offset
            offset += stop - start + self.padding

    def take(self, full: Tensor) -> Tensor:
        """Cut the shard [local_shape] from `full` [full_shape]. Raises ValueError for another shape."""
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
        """Fill `local` [local_shape] from `full` [full_shape] like `take`, but without a second copy in memory."""
        for start, stop, offset in self.spans():
            local.narrow(self.dim, offset, stop - start).copy_(full[self._index(start, stop)])
            local.narrow(self.dim, offset + stop - start, self.padding).zero_()

    def put(self, local: Tensor, full: Tensor) -> None:
        """Copy the pieces of `local` [local_shape], without padding, to their places in `full` [full_shape]."""
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
    ranges: Sequence[Range] | None = None,
    multiple: int = 1,
) -> Shard:
    """Return the shard of one rank: its range in each of `parts` equal parts of `dim`.

    Args:
        ranges: ranges of all ranks in one part; several ranks may have the same. By default each of `size` ranks has
            its own, and the first ranks one more entry if the size does not divide.
        multiple: pad each piece with zeros to a multiple of this.

    Raises ValueError if the parts are not equal, or a rank would have nothing.
    """
    dim = dim % len(full_shape)
    part, left = divmod(full_shape[dim], parts)
    if ranges is None:
        ranges = [shard_range(part, index, size) for index in range(size)]
    widths = tuple((stop - start) * parts for start, stop in ranges)
    if left or not min(widths):
        raise ValueError(f"dimension {dim} of {full_shape} cannot be cut: {parts=}, size={len(ranges)}")
    start, stop = ranges[rank]
    return Shard(
        full_shape=full_shape,
        dim=dim,
        pieces=tuple((index * part + start, index * part + stop) for index in range(parts)),
        padding=-(stop - start) % multiple,
        # The lowest rank with this range owns it.
        owner=(start, stop) not in ranges[:rank],
        widths=widths,
    )


def cut_parameter(param: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Return a new parameter with this rank's shard of `param`, on the same device (also meta)."""
    with torch.no_grad():
        local = shard.take(param.detach())
    return mark(nn.Parameter(local, requires_grad=param.requires_grad), shard)


def mark(param: nn.Parameter, shard: Shard | None) -> nn.Parameter:
    """Set the shard of a parameter, unless it is None (whole), and return the parameter."""
    if shard is not None:
        param.shard = shard  # type: ignore[attr-defined]  # a parameter takes any attribute
        # On tensor-parallel ranks above 0, DeepSpeed's gradient norm counts only parameters with this attribute. A copy
        # of another rank's shard must not be counted twice.
        param.tensor_model_parallel = shard.owner  # type: ignore[attr-defined]  # likewise
    return param


def shard_of(param: Tensor) -> Shard | None:
    """Return the parameter's shard; None if it is replicated."""
    return getattr(param, "shard", None)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`units` consecutive units of `width` entries each, starting at entry `start`."""

    start: int
    units: int
    width: int

    def is_shared(self, size: int) -> bool:
        """Return whether several of `size` ranks use the same unit."""
        return self.units % size != 0

    def fits(self, size: int) -> bool:
        """Return whether each of `size` ranks can use whole units or share one, with equal shards."""
        whole_units = self.units % size == 0 or size % self.units == 0
        return whole_units and self.units * self.width % size == 0

    def share(self, tensor: TensorParallel) -> tuple[int, int]:
        """Return the (start, stop) range that a rank holds, so that every entry is on one rank."""
        length = self.units * self.width // tensor.size
        return self.start + tensor.rank * length, self.start + (tensor.rank + 1) * length

    def used(self, tensor: TensorParallel) -> tuple[int, int]:
        """Return the (start, stop) range that a rank computes with: its own range, or the whole unit that it shares."""
        if not self.is_shared(tensor.size):
            return self.share(tensor)
        unit = tensor.rank * self.units // tensor.size
        return self.start + unit * self.width, self.start + (unit + 1) * self.width


def product_of(words: str, owners: Sequence[nn.Module]) -> list[int]:
    """Return the factors of a product of numbers and of attributes, taken from the nearest of `owners` that has them.

    Raises AttributeError for a name that none of them has.
    """
    return [int(word) if word.isdigit() else _attribute(word, owners) for word in words.replace(" ", "").split("*")]


def sum_of(words: str, owners: Sequence[nn.Module]) -> int:
    """Return the value of a sum of products in the form of `product_of`."""
    return sum(prod(product_of(product, owners)) for product in words.split("+"))


def read_segments(
    words: Sequence[str], owners: Sequence[nn.Module], length: int, tensor: TensorParallel, name: str
) -> list[Segment]:
    """Return the segments of a dimension of `length` entries.

    Raises UserError, naming `name`, if their lengths do not add up to `length`, or the ranks cannot share one's units.
    """
    found: list[Segment] = []
    for word in words:
        units, *rest = product_of(word, owners)
        start = found[-1].start + found[-1].units * found[-1].width if found else 0
        found.append(Segment(start=start, units=units, width=prod(rest)))
    fits = [n for n in range(1, max(part.units for part in found) + 1) if all(part.fits(n) for part in found)]
    for word, segment in zip(words, found, strict=True):
        if not segment.fits(tensor.size):
            raise UserError(
                f"tensor_parallel.autotp_size {tensor.size} does not fit the {segment.units} "
                f"{word.split('*')[0].strip()} of {name}: use {one_of(fits)}"
            )
    if sum(segment.units * segment.width for segment in found) != length:
        raise UserError(
            f"the {length} outputs of {name} are not the concatenation of {', '.join(words)}: correct the plan"
        )
    return found


def shard_of_segments(segments: Sequence[Segment], shape: tuple[int, ...], dim: int, tensor: TensorParallel) -> Shard:
    """Return this rank's share of every segment, each entry on one rank."""
    return Shard(full_shape=shape, dim=dim, pieces=tuple(segment.share(tensor) for segment in segments))


def join_shared(output: Tensor, segments: Sequence[Segment], tensor: TensorParallel) -> Tensor:
    """Replace the parts of shared units in a linear layer's output by whole units, gathered from the other ranks."""
    parts = output.split([stop - start for start, stop in (segment.share(tensor) for segment in segments)], dim=-1)
    return torch.cat([_used(part, s, tensor) for part, s in zip(parts, segments, strict=True)], dim=-1)


def cut_segments(owner: nn.Module, name: str, segments: Sequence[Segment], dim: int, tensor: TensorParallel) -> None:
    """Make the forward of `owner` read only the part of its parameter `name` that this rank uses."""
    param = getattr(owner, name)
    if not any(segment.is_shared(tensor.size) for segment in segments):
        setattr(owner, name, cut_parameter(param, shard_of_segments(segments, tuple(param.shape), dim, tensor)))
        return
    # Ranks share a unit, so the parameter itself stays whole: each entry counts once in a norm.
    ranges = [segment.used(tensor) for segment in segments]

    def used(module: Any) -> Tensor:
        whole: Tensor = module._parameters[name]  # noqa: SLF001  # this property hides the name
        # Partitioned by ZeRO-3: not in a forward, but perhaps in a `repr`.
        if not whole.numel():
            return whole
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)

    kind = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {name: property(used), "__module__": kind.__module__})


def _used(part: Tensor, segment: Segment, tensor: TensorParallel) -> Tensor:
    if not segment.is_shared(tensor.size):
        return part
    # Ranks use the gathered unit differently, so its gradient is partial: `copy_to_group` sums it, and only then is it
    # whole, as the backward of the gather requires.
    whole = copy_to_group(gather_from_group(part, tensor.group), tensor.group)
    start, stop = segment.used(tensor)
    return whole[..., start - segment.start : stop - segment.start]


def _attribute(name: str, owners: Sequence[nn.Module]) -> int:
    for owner in owners:
        if isinstance(found := getattr(owner, name, None), int):
            return found
    raise AttributeError(f"no module around has a number {name}")
