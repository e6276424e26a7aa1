"""torch.compile of a model's layers, and what stays out of it.

Each layer is compiled on its own, as its ranks' communication and its place in a schedule are no part of it. What
communicates, or keeps something from one call to the next, runs as it is written: the compiler breaks its graph there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
_EAGER: list[Eager[..., object]] = []


class Eager(Generic[P, R]):
    """A function that is never compiled. Nothing of the compiler is imported before a layer is compiled."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.run = self._function = function
        update_wrapper(self, function)
        _EAGER.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.run(*args, **kwargs)

    def keep_out(self) -> None:
        """Let the compiler know."""
        self.run = torch.compiler.disable(self._function)


def eager(function: Callable[P, R]) -> Eager[P, R]:
    """Keep a function out of what is compiled."""
    return Eager(function)


def compile_modules(modules: Iterable[nn.Module], backend: str) -> None:
    """Have each module compiled when it is first called, in training and in evaluation."""
    for function in _EAGER:
        function.keep_out()
    for module in modules:
        module.compile(backend=backend)
