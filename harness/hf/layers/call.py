"""The arguments of a decoder layer's call as a value: split, changed, compared, and handed to a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from harness.parallel.values import Argument, Keyword, Positional

HIDDEN = "hidden_states"

Call: TypeAlias = tuple[Positional, Keyword]
LayerOutput: TypeAlias = Any
"""A decoder layer's output: a hidden state, or a tuple or list that begins with one."""


@dataclass(frozen=True)
class LayerInputs:
    """The arguments of a layer's call without the hidden state.

    Attributes:
        args: positional arguments after the hidden state if it is positional, else all.
        kwargs: keyword arguments without the hidden state.
        key: the keyword of the hidden state, or None if it is the first positional argument.
    """

    args: Positional
    kwargs: Keyword
    key: str | None

    @classmethod
    def split(cls, args: Positional, kwargs: Keyword) -> tuple[Tensor, LayerInputs]:
        """Split a layer's arguments into the hidden state [batch, sequence, width] and the rest."""
        key = None if args else HIDDEN
        hidden = args[0] if args else kwargs[HIDDEN]
        rest = {name: value for name, value in kwargs.items() if name != key}
        return hidden, cls(args[1:], rest, key)

    def apply(self, layer: Callable[..., LayerOutput], hidden: Tensor) -> LayerOutput:
        """Call `layer` with the hidden state [batch, sequence, width] and these arguments; return its output."""
        if self.key is None:
            return layer(hidden, *self.args, **self.kwargs)
        return layer(*self.args, **{self.key: hidden}, **self.kwargs)

    def arguments(self) -> dict[int | str, Argument]:
        """Return all arguments by position or keyword."""
        positional: dict[int | str, Argument] = dict(enumerate(self.args))
        return positional | {**self.kwargs}

    def argument(self, at: int | str) -> Argument:
        return self.args[at] if isinstance(at, int) else self.kwargs[at]

    def mapped(self, change: Callable[[Tensor], object]) -> LayerInputs:
        """Apply `change` to every tensor, copying mappings and lists."""
        args = tuple(_mapped(value, change) for value in self.args)
        return LayerInputs(args, {name: _mapped(value, change) for name, value in self.kwargs.items()}, self.key)

    def equals(self, other: LayerInputs) -> bool:
        return same(self.args, other.args) and same(self.kwargs, other.kwargs)


def same(a: object, b: object) -> bool:
    """Return whether two nested values hold equal tensors in equal places."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and _equal(a, b)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return not isinstance(b, (Tensor, tuple, list, Mapping))


def _equal(a: Tensor, b: Tensor) -> bool:
    # Comparing values would wait for the device.
    if a is b:
        return True
    # For torch.equal, NaN differs from NaN.
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _mapped(value: Argument, change: Callable[[Tensor], object]) -> Argument:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for key in value:
            new[key] = _mapped(value[key], change)
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change) for item in value)
    return value
