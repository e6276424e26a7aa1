"""Buffers that a model computes while it is built, and that neither a checkpoint nor `_init_weights` holds.

On the meta device such a buffer is lost. It is found by what initialisation leaves as it was, and made by building the
model once more with real buffers while its parameters stay on meta: no memory is taken for weights, no time for their
initial values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def mark_unfilled(module: nn.Module) -> None:
    """Fill real floating buffers with NaN, so that those that initialisation passes by can be told."""
    for buffer in module.buffers():
        if buffer.is_floating_point() and not buffer.is_meta:
            buffer.fill_(float("nan"))


def unfilled(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the buffers among `tensors` that are still as `mark_unfilled` left them."""
    return [name for name, tensor in tensors if tensor.is_floating_point() and bool(tensor.isnan().all())]


def built_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers of a model as its constructor makes them, on the CPU, by name."""
    with _parameters_on_meta():
        built: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    return dict(built.named_buffers())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let every parameter that a module is given in here lie on the meta device."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
