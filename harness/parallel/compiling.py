"""Compile a model's layers with torch.compile, except for chosen functions.

Each layer is compiled by itself, so the schedule is not compiled. Functions that communicate or keep state between
calls are not compiled: the graph breaks there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from types import MappingProxyType
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn

from harness.config.values.layout_keys import INDUCTOR

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
_EAGER: list[Eager[..., object]] = []


class Eager(Generic[P, R]):
    """A function that is never compiled."""

    def __init__(self, function: Callable[P, R]) -> None:
        # `torch.compiler.disable` as a decorator would import the compiler in every run, which takes about a second. So
        # `compile_modules` applies it.
        self.run = self.function = function
        update_wrapper(self, function)
        _EAGER.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.run(*args, **kwargs)


def compile_modules(modules: Iterable[nn.Module], **options: object) -> None:
    """Compile each module at its first call in training, and again at its first call in evaluation.

    `options` are passed to torch.compile.
    """
    for eager in _EAGER:
        eager.run = torch.compiler.disable(eager.function)
    for module in modules:
        # In place: around a module, torch.compile would put another one, which changes the names of its parameters.
        module.compile(**options)


def waits_for_compiler(backend: str, options: Mapping[str, object] = MappingProxyType({})) -> str:
    """Return a message that says which steps compile, and where the code is cached for later runs.

    Args:
        options: the options of torch.compile. By default it compiles once for a second length, and then for all.
    """
    kept = ""
    if backend == INDUCTOR:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        kept = f", which keeps its code in {cache_dir()} for later runs"
    if options.get("dynamic") is False:
        from torch._dynamo import config

        limit = f"; of more than {config.recompile_limit} lengths the others run uncompiled"
        return f"compile.dynamic false: the first step of each length waits for {backend}{kept}{limit}"
    return f"compile.enabled: the first step, and the first of another length, wait for {backend}{kept}"
