"""Weights that hold several segments of unequal width side by side: query, key and value of grouped attention; gate,
inputs, states and time steps of a state-space mixer.

A rule says the width of each as a product, as in "num_key_value_heads * head_dim": its first factor is the number of
units (heads, groups, channels) that are dealt out, the rest is the width of one. Names are attributes of the module
that owns the weight, or of one above it. Where there are fewer units than ranks, neighbouring ranks use the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.parallel.comm import TensorParallel, copy_to_group, gather_from_group
from harness.parallel.tensor.shard import Shard, cut_parameter
from harness.wording import one_of


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`units` neighbouring units of `width` entries each, from entry `start` on."""

    start: int
    units: int
    width: int

    def is_shared(self, size: int) -> bool:
        """Whether several of `size` ranks use the same unit."""
        return self.units % size != 0

    def fits(self, size: int) -> bool:
        """Return whether `size` ranks can each use whole units, or share one, and hold equal shares."""
        whole_units = self.units % size == 0 or size % self.units == 0
        return whole_units and self.units * self.width % size == 0

    def share(self, tensor: TensorParallel) -> tuple[int, int]:
        """Return the range that a rank holds where every entry is held once."""
        length = self.units * self.width // tensor.size
        return self.start + tensor.rank * length, self.start + (tensor.rank + 1) * length

    def used(self, tensor: TensorParallel) -> tuple[int, int]:
        """Return the range that a rank uses: its share, or the unit that it shares with its neighbours."""
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
    """Return the value of a sum of products, as `product_of` reads each."""
    return sum(prod(product_of(product, owners)) for product in words.split("+"))


def read_segments(
    words: Sequence[str], owners: Sequence[nn.Module], length: int, tensor: TensorParallel, name: str
) -> list[Segment]:
    """Return the segments of a dimension of `length` entries.

    Raises UserError, naming `name`, where they are not as long together, or the ranks cannot share one's units.
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
    """Return a linear layer's output (..., this rank's shares) with the unit that this rank uses in the place of its
    share, where ranks share one."""
    parts = output.split([stop - start for start, stop in (segment.share(tensor) for segment in segments)], dim=-1)
    return torch.cat([_used(part, s, tensor) for part, s in zip(parts, segments, strict=True)], dim=-1)


def cut_segments(owner: nn.Module, name: str, segments: Sequence[Segment], dim: int, tensor: TensorParallel) -> None:
    """Let the forward of `owner` see what this rank uses of its parameter `name`.

    Where ranks share a unit, the parameter itself stays whole, so that each entry counts once in a norm.
    """
    param = getattr(owner, name)
    if not any(segment.is_shared(tensor.size) for segment in segments):
        setattr(owner, name, cut_parameter(param, shard_of_segments(segments, tuple(param.shape), dim, tensor)))
        return
    ranges = [segment.used(tensor) for segment in segments]

    def used(module: Any) -> Tensor:
        whole: Tensor = module._parameters[name]  # noqa: SLF001  # this property hides the name
        if not whole.numel():  # ZeRO-3 holds its values elsewhere: no forward asks now, but a module's `repr` may
            return whole
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)

    kind = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {name: property(used), "__module__": kind.__module__})


def _used(part: Tensor, segment: Segment, tensor: TensorParallel) -> Tensor:
    if not segment.is_shared(tensor.size):
        return part
    whole = copy_to_group(gather_from_group(part, tensor.group), tensor.group)
    start, stop = segment.used(tensor)
    return whole[..., start - segment.start : stop - segment.start]


def _attribute(name: str, owners: Sequence[nn.Module]) -> int:
    for owner in owners:
        if isinstance(found := getattr(owner, name, None), int):
            return found
    raise AttributeError(f"no module around has a number {name}")
