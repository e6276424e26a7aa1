"""A box of one tensor as a part of another, with its dimensions perhaps in another order.

Lazy tensors (`lazy.py`) are made of such patches: a reader fills the part from the box, a writer finds the places in a
file that the box of a parameter goes to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension."""


class TensorSource(Protocol):
    """Where values come from."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, into: Tensor, box: Box) -> None:
        """Copy the values in `box` to `into`, which has its sizes and any dtype, device and strides."""


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A box of a leaf and its place in a lazy tensor.

    `start` is where it begins there. `axes` gives for each dimension there the leaf's, or None for one of size 1 that
    the leaf has not; a dimension of the leaf that is not among them has size 1 in the box.
    """

    leaf: TensorSource
    box: Box
    start: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its sizes in the lazy tensor."""
        return tuple(1 if axis is None else self.box[axis][1] - self.box[axis][0] for axis in self.axes)

    @property
    def place(self) -> tuple[slice, ...]:
        """Its index in the lazy tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its leaf, unmoved."""
        full = all(span == (0, size) for span, size in zip(self.box, self.leaf.shape, strict=True))
        return full and self.axes == tuple(range(len(self.box))) and not any(self.start)

    def clipped(self, axis: int, start: int, stop: int) -> TensorSlice | None:
        """Return the part within (start, stop) along a dimension of the leaf, in its place; None if there is none."""
        first, last = max(start, self.box[axis][0]), min(stop, self.box[axis][1])
        if first >= last:
            return None
        at = list(self.start)
        if axis in self.axes:
            at[self.axes.index(axis)] += first - self.box[axis][0]
        return replace(self, box=(*self.box[:axis], (first, last), *self.box[axis + 1 :]), start=tuple(at))

    def moved(self, dim: int, by: int) -> TensorSlice:
        """Shifted along a dimension of the lazy tensor."""
        return replace(self, start=(*self.start[:dim], self.start[dim] + by, *self.start[dim + 1 :]))

    def leaf_view(self, view: Tensor) -> Tensor:
        """`view`, of this patch's sizes, with its dimensions as the leaf has them."""
        for dim in reversed(range(len(self.axes))):
            if self.axes[dim] is None:
                view = view.squeeze(dim)
        kept = [axis for axis in self.axes if axis is not None]
        view = view.permute(sorted(range(len(kept)), key=kept.__getitem__))
        for missing in (axis for axis in range(len(self.box)) if axis not in kept):
            view = view.unsqueeze(missing)
        return view

    def lazy_view(self, values: Tensor) -> Tensor:
        """`values`, of this patch's box of the leaf, with their dimensions as the lazy tensor has them."""
        for missing in (axis for axis in reversed(range(len(self.box))) if axis not in self.axes):
            values = values.squeeze(missing)
        kept = [axis for axis in self.axes if axis is not None]
        values = values.permute([sorted(kept).index(axis) for axis in kept])
        for dim, axis in enumerate(self.axes):
            if axis is None:
                values = values.unsqueeze(dim)
        return values
