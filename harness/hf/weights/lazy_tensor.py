"""Tensors that refer to stored values instead of holding them.

Code can use a `LazyTensor` like a tensor. Splitting, joining, stacking or permuting it returns another `LazyTensor`,
made of `TensorSlice`s: boxes of a source, such as a tensor in a file. Nothing is read until a lazy tensor is copied
into a real one, and then only the needed part. So transformers' own operations, which convert a checkpoint's tensors to
a model's and back, run on tensors that no rank could hold. An operation that does more than rearrange values is
computed from its whole inputs when its result is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from harness.parallel.values import Keyword, Positional

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension."""


class TensorSource(Protocol):
    """A source of values."""

    @property
    def name(self) -> str:
        """The name of the values in their source."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in the source."""

    def read(self, into: Tensor, box: Box) -> None:
        """Copy the values in `box` to `into`, which has the sizes of `box` and any dtype, device and strides."""


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A box of a leaf and its place in a lazy tensor, whose dimensions may have another order.

    Attributes:
        leaf: the source of the values.
        box: the part of the leaf.
        start: index of the box's first element in the lazy tensor.
        axes: for each dimension of the lazy tensor, the leaf's dimension, or None for a size of 1 that the leaf lacks.
            A missing dimension of the leaf has size 1 in the box.
    """

    leaf: TensorSource
    box: Box
    start: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the box in the lazy tensor."""
        return tuple(1 if axis is None else self.box[axis][1] - self.box[axis][0] for axis in self.axes)

    @property
    def place(self) -> tuple[slice, ...]:
        """The index of the box in the lazy tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole leaf, with its dimensions in order."""
        full = all(span == (0, size) for span, size in zip(self.box, self.leaf.shape, strict=True))
        return full and self.axes == tuple(range(len(self.box))) and not any(self.start)

    def clipped(self, axis: int, start: int, stop: int) -> TensorSlice | None:
        """Return the part in (start, stop) along a dimension of the leaf, or None if it is empty."""
        first, last = max(start, self.box[axis][0]), min(stop, self.box[axis][1])
        if first >= last:
            return None
        at = list(self.start)
        if axis in self.axes:
            at[self.axes.index(axis)] += first - self.box[axis][0]
        return replace(self, box=(*self.box[:axis], (first, last), *self.box[axis + 1 :]), start=tuple(at))

    def moved(self, dim: int, by: int) -> TensorSlice:
        return replace(self, start=(*self.start[:dim], self.start[dim] + by, *self.start[dim + 1 :]))

    def leaf_view(self, view: Tensor) -> Tensor:
        """Return `view`, of this slice's sizes, with dimensions in the leaf's order."""
        # From the last on, so that the dimensions still to come keep their numbers.
        for dim in reversed(range(len(self.axes))):
            if self.axes[dim] is None:
                view = view.squeeze(dim)
        kept = [axis for axis in self.axes if axis is not None]
        view = view.permute(sorted(range(len(kept)), key=kept.__getitem__))
        for missing in (axis for axis in range(len(self.box)) if axis not in kept):
            view = view.unsqueeze(missing)
        return view


aten = torch.ops.aten


class LazyTensor(Tensor):
    """A tensor made of patches that cover it. Copy it into a real tensor to read it."""

    patches: tuple[TensorSlice, ...]

    @staticmethod
    def __new__(cls, patches: Sequence[TensorSlice], shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
        # As torch documents it for subclasses without memory.
        make = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        tensor: LazyTensor = make(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        tensor.patches = tuple(patches)
        return tensor

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def of(cls, leaf: TensorSource) -> LazyTensor:
        """Return a lazy tensor of the whole `leaf`."""
        rank = len(leaf.shape)
        patch = TensorSlice(leaf, tuple((0, size) for size in leaf.shape), (0,) * rank, tuple(range(rank)))
        return cls([patch], leaf.shape, leaf.dtype)

    def read_into(self, into: Tensor) -> None:
        """Copy the values to a tensor of the same shape, of any dtype and device."""
        for patch in self.patches:
            patch.leaf.read(patch.leaf_view(into[patch.place]), patch.box)

    def leaves(self) -> Iterator[TensorSource]:
        """Yield the tensor's sources; for a computed source, its inputs' sources."""
        for patch in self.patches:
            if isinstance(patch.leaf, Computed):
                for source in patch.leaf.inputs:
                    yield from source.leaves()
            else:
                yield patch.leaf

    def with_leaves(self, change: Callable[[str], TensorSource]) -> LazyTensor:
        """Return a lazy tensor that arranges other leaves alike; `change` maps a leaf's name to the new leaf."""

        def changed(leaf: TensorSource) -> TensorSource:
            if not isinstance(leaf, Computed):
                return change(leaf.name)
            args, kwargs = _map_lazy(lambda source: source.with_leaves(change), leaf.args, leaf.kwargs)
            return replace(leaf, args=args, kwargs=kwargs)

        return LazyTensor([replace(patch, leaf=changed(patch.leaf)) for patch in self.patches], self.shape, self.dtype)

    # torch declares these three more narrowly than it calls them
    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Lazy({tuple(self.shape)}, {self.dtype}, {len(self.patches)} patches)"

    # Functions are not intercepted, only the operations that they consist of: `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            target, source = args[:2]
            source.read_into(target)
            return target
        arrange = arrangement(func)
        return arrange(*args, **kwargs) if arrange is not None else LazyTensor.of(computed(func, args, kwargs))


@dataclass(frozen=True, eq=False)
class Computed:
    """A leaf that `func` computes from whole lazy tensors at every read."""

    func: Callable[..., Tensor]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""

    @property
    def inputs(self) -> list[LazyTensor]:
        """The lazy tensors among the arguments."""
        found: list[LazyTensor] = []
        tree_map(lambda arg: found.append(arg) if isinstance(arg, LazyTensor) else None, (self.args, self.kwargs))
        return found

    def read(self, into: Tensor, box: Box) -> None:
        """Compute all values, and copy the part in `box` to `into`, which has the sizes of `box`."""
        args, kwargs = _map_lazy(realised, self.args, self.kwargs)
        into.copy_(self.func(*args, **kwargs)[tuple(slice(*span) for span in box)])


@dataclass(frozen=True, eq=False)
class InMemory:
    """A leaf with values in memory, or mapped from a file."""

    tensor: Tensor
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, into: Tensor, box: Box) -> None:
        """Copy the values in `box` to `into`, which has the sizes of `box`."""
        into.copy_(self.tensor[tuple(slice(*span) for span in box)])


def realised(lazy: LazyTensor) -> Tensor:
    """Return a real tensor with all values of `lazy`."""
    whole = torch.empty(lazy.shape, dtype=lazy.dtype)
    lazy.read_into(whole)
    return whole


def computed(func: Callable[..., Tensor], args: tuple[object, ...], kwargs: dict[str, object]) -> Computed:
    """Return the result of `func` as a leaf that is computed on reading; its shape is found on the meta device.

    Raises NotImplementedError if `func` does not return one tensor.
    """
    on_meta = _map_lazy(lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), args, kwargs)
    shaped = func(*on_meta[0], **on_meta[1])
    if not isinstance(shaped, Tensor):
        raise NotImplementedError(f"{func} of tensors that are not read yet")
    return Computed(func, args, kwargs, tuple(shaped.shape), shaped.dtype)


def _map_lazy(change: Callable[[LazyTensor], object], args: Positional, kwargs: Keyword) -> tuple[Positional, Keyword]:
    mapped: tuple[Positional, Keyword] = tree_map(
        lambda arg: change(arg) if isinstance(arg, LazyTensor) else arg, (args, kwargs)
    )
    return mapped


# -- arrangements: operations on slices alone ----------------------------------------------------------------


def arrangement(func: Callable[..., object]) -> Callable[..., object] | None:
    """Return a function that applies a torch operation to slices; None if the operation does more than rearrange."""
    match func:
        case aten.detach.default | aten.alias.default | aten.clone.default | aten.lift_fresh.default:
            return lambda lazy, **_: LazyTensor(lazy.patches, lazy.shape, lazy.dtype)
        case aten._to_copy.default:  # noqa: SLF001  # torch's name of the operation
            # A cast is deferred: values keep their stored dtype until they are copied into a tensor.
            return lambda lazy, dtype=None, **_: LazyTensor(lazy.patches, lazy.shape, dtype or lazy.dtype)
        case aten.slice.Tensor:
            return _slice
        case aten.select.int:
            return lambda lazy, dim, index: _squeeze(_part(lazy, dim, index % lazy.shape[dim], 1), dim)
        case aten.split.Tensor:
            return lambda lazy, size, dim=0: _split(lazy, _equal_sizes(lazy.shape[dim], size), dim)
        case aten.split_with_sizes.default:
            return lambda lazy, sizes, dim=0: _split(lazy, sizes, dim)
        case aten.unbind.int:
            return lambda lazy, dim=0: [_squeeze(p, dim) for p in _split(lazy, [1] * lazy.shape[dim], dim)]
        case aten.cat.default:
            return lambda parts, dim=0: _join(parts, dim)
        case aten.stack.default:
            return lambda parts, dim=0: _join([_unsqueeze(part, dim) for part in parts], dim)
        case aten.squeeze.dim:
            return lambda lazy, dim: _squeeze(lazy, dim) if lazy.shape[dim] == 1 else lazy
        case aten.unsqueeze.default:
            return _unsqueeze
        case aten.t.default:
            return lambda lazy: _permute(lazy, range(lazy.dim())[::-1])
        case aten.transpose.int:
            return _transpose
        case aten.permute.default:
            return _permute
    return None


def _slice(
    lazy: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor:
    first, last, _ = slice(start, end).indices(lazy.shape[dim])
    # A box has no steps.
    if step != 1:
        return LazyTensor.of(computed(aten.slice.Tensor, (lazy, dim, start, end, step), {}))
    return _part(lazy, dim, first, max(last - first, 0))


def _part(lazy: LazyTensor, dim: int, first: int, size: int) -> LazyTensor:
    dim %= lazy.dim()
    kept = []
    for patch in lazy.patches:
        axis = patch.axes[dim]
        at = patch.start[dim]
        if axis is None:
            inside = patch if first <= at < first + size else None
        else:
            offset = patch.box[axis][0] - at
            inside = patch.clipped(axis, first + offset, first + size + offset)
        if inside is not None:
            kept.append(inside.moved(dim, -first))
    return LazyTensor(kept, (*lazy.shape[:dim], size, *lazy.shape[dim + 1 :]), lazy.dtype)


def _split(lazy: LazyTensor, sizes: Sequence[int], dim: int) -> list[LazyTensor]:
    return [_part(lazy, dim, stop - size, size) for stop, size in zip(accumulate(sizes), sizes, strict=True)]


def _equal_sizes(total: int, size: int) -> list[int]:
    # An empty tensor has one empty part.
    return [min(size, total - start) for start in range(0, total, size)] or [0]


def _join(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    lazies = [part if isinstance(part, LazyTensor) else LazyTensor.of(InMemory(part)) for part in parts]
    dim %= lazies[0].dim()
    patches: list[TensorSlice] = []
    total = 0
    if len({(*lazy.shape[:dim], *lazy.shape[dim + 1 :]) for lazy in lazies}) > 1:
        raise ValueError(f"tensors of shapes {sorted({tuple(lazy.shape) for lazy in lazies})} cannot be joined")
    for lazy in lazies:
        patches += [patch.moved(dim, total) for patch in lazy.patches]
        total += lazy.shape[dim]
    shape = lazies[0].shape
    return LazyTensor(patches, (*shape[:dim], total, *shape[dim + 1 :]), lazies[0].dtype)


def _unsqueeze(lazy: LazyTensor, dim: int) -> LazyTensor:
    lazy = lazy if isinstance(lazy, LazyTensor) else LazyTensor.of(InMemory(lazy))
    dim %= lazy.dim() + 1
    patches = [
        replace(p, start=(*p.start[:dim], 0, *p.start[dim:]), axes=(*p.axes[:dim], None, *p.axes[dim:]))
        for p in lazy.patches
    ]
    return LazyTensor(patches, (*lazy.shape[:dim], 1, *lazy.shape[dim:]), lazy.dtype)


def _squeeze(lazy: LazyTensor, dim: int) -> LazyTensor:
    dim %= lazy.dim()
    patches = [
        replace(p, start=(*p.start[:dim], *p.start[dim + 1 :]), axes=(*p.axes[:dim], *p.axes[dim + 1 :]))
        for p in lazy.patches
    ]
    return LazyTensor(patches, (*lazy.shape[:dim], *lazy.shape[dim + 1 :]), lazy.dtype)


def _permute(lazy: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    dims = [dim % lazy.dim() for dim in dims]
    patches = [
        replace(p, start=tuple(p.start[d] for d in dims), axes=tuple(p.axes[d] for d in dims)) for p in lazy.patches
    ]
    return LazyTensor(patches, [lazy.shape[d] for d in dims], lazy.dtype)


def _transpose(lazy: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    dims = list(range(lazy.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(lazy, dims)
