"""Draw initial values of parameters like the model's own `_init_weights`: tensor by tensor, in pieces.

A tensor's random numbers depend only on the seed and its name, and a piece's also on its start. So a rank draws only
the pieces that overlap its shard of a tensor, and every layout gets the same values. A small tensor is one piece, which
`_init_weights` fills. For a large one, the operations of `_init_weights` are recorded on the meta device and applied to
each piece. A large tensor is drawn whole only if its values depend on one another (an orthogonal matrix).

Some values come from the constructor instead: buffers and a few small parameters (a learnt scale that begins at 1). The
meta device loses them. They are recognised because `_init_weights` does not touch them, and restored by building the
model once more with real buffers and small parameters, while large parameters stay on meta.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, initialization

from harness.hf.weights.lazy_tensor import Box
from harness.parallel.generators import own_generators, own_torch_generators
from harness.parallel.values import Keyword, Operation, Positional

SMALL = 1 << 18  # parameters up to this number of elements may get the constructor's values
PIECE_BYTES = 4 << 20  # largest piece drawn at a time

aten = torch.ops.aten

# Operations that set or change each value independently, so that they can be applied to a part of a tensor.
_ELEMENTWISE = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.clamp_.default,
    aten.erfinv_.default,
}

# Functions of `torch.nn.init` that do nothing on meta -> whether they draw each value independently.
_NOT_ON_META = {"trunc_normal_": True, "orthogonal_": False, "sparse_": False, "dirac_": False}


def mark_unfilled(tensors: Iterable[Tensor]) -> None:
    """Fill real floating-point tensors with NaN, to recognise tensors that initialisation does not touch."""
    for tensor in tensors:
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.fill_(float("nan"))


def is_unfilled(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isnan().all())


def constructed(model: PreTrainedModel, seed: int, shape: Sequence[int] = ()) -> dict[str, Tensor]:
    """Return name -> CPU tensor of buffers, small parameters and parameters of `shape`, from the constructor."""
    with _large_parameters_on_meta(tuple(shape)), own_generators(seed):
        built: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    tensors = (*built.named_parameters(remove_duplicate=False), *built.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors if not tensor.is_meta}


@contextmanager
def _large_parameters_on_meta(kept: tuple[int, ...]) -> Iterator[None]:
    """In this context, move parameters to meta when they are registered, except small and `kept` ones."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > SMALL and tuple(parameter.shape) != kept:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    # For all modules, as a constructor makes its parameters deep inside; only in this context.
    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True)
class Change:
    """An operation on elements `start` to `stop` - 1 of a flattened tensor: `function(elements, *args, **kwargs)`."""

    function: Callable[..., object]
    start: int
    stop: int
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def apply(self, values: Tensor, at: int) -> None:
        """Apply the operation to its elements among `values`, the flat elements from `at` on."""
        first, last = max(self.start, at), min(self.stop, at + len(values))
        if first < last:
            self.function(values[first - at : last - at], *self.args, **self.kwargs)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A leaf of lazy tensors: a parameter whose values are drawn on reading.

    Attributes:
        name: the parameter's name in the model.
        seed: the whole model's seed.
        device: where the values are drawn.
        draw: draw all of the parameter's values into a tensor.
        changes: operations to apply to each piece instead; None if the tensor is drawn whole.
        scratch: memory for pieces, shared by all tensors, which are read in turn.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    device: torch.device
    draw: Callable[[Tensor], None]
    changes: tuple[Change, ...] | None
    scratch: Scratch

    def read(self, into: Tensor, box: Box) -> None:
        """Draw the pieces that overlap `box`; copy the values in it to `into`, which has the sizes of `box`."""
        most = prod(self.shape) if self.changes is None else PIECE_BYTES // self.dtype.itemsize
        for piece in _pieces(self.shape, most):
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece, box, strict=True)]
            if all(first < last for first, last in common):
                inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, piece, strict=True))
                place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
                into[place].copy_(self._piece(piece)[inside])

    def _piece(self, box: Box) -> Tensor:
        """Return the values of a piece; the last piece is cached, as several parts of it may be read."""
        start = sum(first * prod(self.shape[dim + 1 :]) for dim, (first, _) in enumerate(box))
        if self.scratch.holds != (self.name, start):
            sizes = [last - first for first, last in box]
            self.scratch.values = self._draw(start, self.scratch.room_for(sizes, self.dtype, self.device))
            self.scratch.holds = (self.name, start)
        return self.scratch.values

    def _draw(self, start: int, values: Tensor) -> Tensor:
        # Not Python's `hash`: it differs between processes.
        digest = hashlib.sha256(f"{self.seed}:{self.name}:{start}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        # A family may draw as it likes, also by numpy.
        if self.changes is None:
            with own_generators(seed, self.device):
                self.draw(values)
            return values
        with own_torch_generators(seed, self.device):
            for change in self.changes:
                change.apply(values.view(-1), start)
        return values


class Scratch:
    """The last drawn piece, in memory that the next piece reuses, so that the heap is not fragmented."""

    def __init__(self) -> None:
        self.holds: tuple[str, int] | None = None
        self.values = torch.empty(0)
        self._memory = torch.empty(0)

    def room_for(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor [*sizes] without values."""
        self.holds = None
        # Frees a last piece with memory of its own before the next is allocated.
        self.values = torch.empty(0)
        count = prod(sizes)
        if count * dtype.itemsize > PIECE_BYTES:
            return torch.empty(tuple(sizes), dtype=dtype, device=device)
        if not len(self._memory):
            self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        return self._memory[: count * dtype.itemsize].view(dtype).view(tuple(sizes))


def changes_of(parameter: Tensor, initialise: Callable[[Tensor], None]) -> tuple[Change, ...] | None:
    """Return the operations of `initialise` on a tensor like `parameter`; None if values depend on one another."""
    tensor = torch.empty_like(parameter, device="meta")
    recording = _Recording(tensor)
    try:
        with recording, recording.of_init_functions():
            initialise(tensor)
    # It looks at values, which meta does not have.
    except (RuntimeError, NotImplementedError):
        return None
    return tuple(recording.changes) if recording.complete and recording.changes else None


@contextmanager
def standing_for(names: Sequence[str], root: nn.Module, values: Tensor) -> Iterator[None]:
    """In this context, replace the parameter of `root` with these names by `values`, of its shape.

    Small parameters of the same module get memory on the same device, as one computation may use both.
    """
    own: dict[int, nn.Parameter] = {id(root.get_parameter(names[0])): nn.Parameter(values)}
    modules = [root.get_submodule(name.rpartition(".")[0]) for name in names]
    before = [dict(module.named_parameters(recurse=False, remove_duplicate=False)) for module in modules]
    for module, parameters in zip(modules, before, strict=True):
        for name, parameter in parameters.items():
            if id(parameter) not in own and parameter.numel() <= SMALL:
                own[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=values.device))
            module.register_parameter(name, own.get(id(parameter), parameter))
    try:
        yield
    finally:
        for module, parameters in zip(modules, before, strict=True):
            for name, parameter in parameters.items():
                module.register_parameter(name, parameter)


class _Recording(TorchDispatchMode):
    """Records the in-place operations on one tensor on the meta device, and on views of it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.storage = _storage_of(tensor)
        self.changes: list[Change] = []
        self.complete = True

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        kwargs = kwargs or {}
        schema = func._schema  # noqa: SLF001  # torch has no public name for it
        written = [
            value
            for value, argument in zip(args, schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and self._is_ours(value)
        ]
        if written:
            self._record(func if func in _ELEMENTWISE else None, written[0], args[1:], kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def of_init_functions(self) -> Iterator[None]:
        """Also record functions that torch skips on meta: truncated normals, orthogonal matrices."""
        functions: Any = initialization.TORCH_INIT_FUNCTIONS
        originals = {name: functions[name] for name in _NOT_ON_META}
        # In both: transformers calls its table, and a family may call torch.
        for name, function in originals.items():
            functions[name] = partial(self._init_function, function, _NOT_ON_META[name])
            setattr(nn.init, name, functions[name])
        try:
            yield
        finally:
            for name, function in originals.items():
                functions[name] = function
                setattr(nn.init, name, function)

    def _init_function(
        self, function: Callable[..., object], elementwise: bool, tensor: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        if self._is_ours(tensor):
            self._record(function if elementwise else None, tensor, args, kwargs)
        return tensor

    def _is_ours(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.is_meta and _storage_of(value) == self.storage

    def _record(
        self, function: Callable[..., object] | None, view: Tensor, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # Another tensor would have to be cut like the piece, and one on meta has no values to copy.
        one_by_one = all(other.numel() == 1 and not other.is_meta for other in others)
        if function is None or not view.is_contiguous() or not one_by_one:
            self.complete = False
            return
        start = int(view.storage_offset())
        self.changes.append(Change(function, start, start + view.numel(), args, kwargs))


def _storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, shared by its views, even without memory."""
    # The public address is 0 on the meta device.
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


def _pieces(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes of at most `most` elements, each contiguous in memory, that together make up a tensor of `shape`."""
    cut = next((dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= most), 0)
    if not shape or prod(shape) <= most:
        yield tuple((0, size) for size in shape)
        return
    rows = max(most // prod(shape[cut + 1 :]), 1)
    rest = tuple((0, size) for size in shape[cut + 1 :])
    for index in product(*map(range, shape[:cut])):
        before = tuple((at, at + 1) for at in index)
        for first in range(0, shape[cut], rows):
            yield (*before, (first, min(first + rows, shape[cut])), *rest)
