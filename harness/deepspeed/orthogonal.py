"""DeepSpeed's Newton-Schulz iterations, without its Muon optimizer around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from deepspeed.runtime import compiler
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def newton_schulz(matrix: Tensor, method: str) -> Tensor:
    """Return an approximation of the orthogonal matrix nearest to `matrix`, of its shape, by five iterations.

    Args:
        method: "gram" iterates on the small Gram matrix in fp16, anything else on the matrix itself in bf16; both in
            float32 where the device lacks that type.
    """
    # imported late, as it brings torch's compiler
    from deepspeed.runtime.zero.muon import original_muon

    iterate = original_muon.zeropower_via_gram_newtonschulz
    if method != "gram":
        iterate = original_muon.zeropower_via_newtonschulz5
    found: Tensor = iterate(matrix, steps=5)
    return found


def import_muon_without_compiler() -> None:
    """Import DeepSpeed's Muon, as every ZeRO engine does, but without torch's compiler until Muon is used.

    A decorator in that module imports the compiler at once, which takes more than a second of each start.
    """
    compile_at_once, compiler.compile = compiler.compile, lambda: _compiled_when_called
    try:
        from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    finally:
        compiler.compile = compile_at_once


def _compiled_when_called(function: Callable[P, R]) -> Callable[P, R]:
    @functools.cache
    def compiled() -> Callable[P, R]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        return compiled()(*args, **named)

    return call
