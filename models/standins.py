"""What stands in a frame in the place of real modules: stubs of decoder layers, stand-ins of prologue modules.

Both answer for attributes of the module whose place they take (`attention_type`, `padding_idx`, `weight.dtype`),
because a model's forward may ask for them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.config.errors import UserError

if TYPE_CHECKING:
    from harness.models.frame import Frame

HIDDEN = "hidden_states"


class Reached(Exception):
    """Ends a run of the model's forward early, with the hidden state at that point."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("reached")
        self.hidden = hidden


@dataclass(frozen=True)
class Call:
    """The arguments of a layer's call without the hidden state.

    Attributes:
        args: positional arguments after the hidden state if it is positional, else all.
        kwargs: keyword arguments without the hidden state.
        key: the keyword of the hidden state, or None if it is the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str | None

    def apply(self, layer: nn.Module, hidden: Tensor) -> Any:
        """Call `layer` with the hidden state and these arguments; returns what the layer returns."""
        if self.key is None:
            return layer(hidden, *self.args, **self.kwargs)
        return layer(*self.args, **{self.key: hidden}, **self.kwargs)

    def equals(self, other: Call) -> bool:
        """Whether both hold the same values."""
        return _same(self.args, other.args) and _same(self.kwargs, other.kwargs)


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The hidden state and the rest of a layer's arguments."""
    key = None if args else HIDDEN
    hidden = args[0] if args else kwargs[HIDDEN]
    rest = {name: value for name, value in kwargs.items() if name != key}
    return hidden, Call(args[1:], rest, key)


class Delegate(nn.Module):
    """A module that has no state of its own and answers for another's attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not registered: its parameters are not ours

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


class LayerStub(Delegate):
    """In the place of a decoder layer: hands its arguments to the frame and returns the hidden state that it gets."""

    def __init__(self, original: nn.Module, index: int, frame: Frame) -> None:
        super().__init__(original)
        self.__dict__.update(index=index, frame=frame)
        self.outputs: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, call = split_call(args, kwargs)
        if self.outputs is None:
            self.outputs = count_outputs(self.original, call, hidden)
        result = self.frame.handle(self.index, call, hidden)
        return (result, *[None] * (self.outputs - 1)) if self.outputs else result


class StandIn(Delegate):
    """In the place of a prologue module: a constant of the output's shape, or its input if that has the shape."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.called = False
        self.dtype = torch.float32
        self.fill = 0.0

    def forward(self, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.called = True
        if isinstance(self.original, nn.Embedding):
            width = self.original.embedding_dim
        elif isinstance(self.original, nn.Linear):
            width = self.original.out_features
            value = value[..., 0]
        else:
            return value
        return torch.full((*value.shape, width), self.fill, dtype=self.dtype, device=value.device)


@torch.no_grad()
def count_outputs(layer: nn.Module, call: Call, hidden: Tensor) -> int:
    """How many values a layer (on the meta device) returns: 0 for a bare hidden state, else the length of its tuple."""
    try:
        args, kwargs = tree_map(_to_meta, (call.args, call.kwargs))
        output = Call(args, kwargs, call.key).apply(layer, hidden.to("meta"))
    except (
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):  # a forward that looks at values cannot run on meta
        real = copy.deepcopy(layer).to_empty(device=hidden.device)
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.zero_()
        output = call.apply(real, hidden)
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor) or first.shape != hidden.shape:
        raise UserError(f"{type(layer).__name__} does not return a hidden state first, so it cannot be cut into stages")
    return len(output) if isinstance(output, (tuple, list)) else 0


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return True
