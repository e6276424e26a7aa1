"""A dry run of a decoder layer without weights, which shows its outputs and the random numbers that it draws.

On the meta device tensors have only shapes, so a forward that reads values (such as a loop over the experts that tokens
chose) cannot run there. It runs on zeros that take no memory, because a layer of a large model may not fit anywhere.
"""

from __future__ import annotations

import copy
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from harness.hf.layers.call import LayerInputs
from harness.parallel.dropout import ShapeRecorder
from harness.parallel.generators import own_generators
from harness.parallel.plans.experts import run_experts_by

META = torch.device("meta")
CPU = torch.device("cpu")
# Errors of a forward that reads the values of tensors on meta.
ASKS_FOR_VALUES = (NotImplementedError, RuntimeError, ValueError)
# Errors of a forward that needs something that a placeholder lacks.
CANNOT_RUN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
# Without it, Linux refuses to map more memory than it has. Only later versions of Python name the flag.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
Result = TypeVar("Result")


@torch.no_grad()
def dry_run(
    layer: nn.Module, inputs: LayerInputs, hidden: Tensor, run: Callable[[nn.Module, LayerInputs, Tensor], Result]
) -> Result:
    """Return `run(layer, inputs, hidden)` for a layer on the meta device, run with the least memory.

    `hidden` is [batch, sequence, width]. Tries meta, then zeros on the CPU, then the device of `hidden`; raises the
    last error.
    """

    def attempt(device: torch.device) -> Result:
        with _any_experts(layer, "batched_mm" if device == META else "eager"):
            return run(zeroed(layer, device), inputs.mapped(lambda tensor: tensor.to(device)), hidden.to(device))

    *first, last = dict.fromkeys((META, CPU, hidden.device))
    for device in first:
        try:
            return attempt(device)
        except ASKS_FOR_VALUES:
            continue
    return attempt(last)


def drawn_shapes(layer: nn.Module, inputs: LayerInputs, hidden: Tensor) -> list[torch.Size]:
    """Return the shapes of the random numbers that a layer on meta draws for `hidden` [batch, sequence, width].

    The arguments may have another dtype than the layer, as in 16-bit runs.
    """
    dtype = next((weight.dtype for weight in layer.parameters() if weight.is_floating_point()), hidden.dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def run(zeros: nn.Module, inputs: LayerInputs, hidden: Tensor) -> list[torch.Size]:
        with ShapeRecorder() as drawn:
            inputs.apply(zeros, hidden)
        return drawn.shapes

    # The layer's draws must not advance the run's generators.
    with own_generators(0, hidden.device):
        return dry_run(layer, inputs.mapped(cast), cast(hidden), run)


@contextmanager
def _any_experts(layer: nn.Module, implementation: str) -> Iterator[None]:
    """Within this context, make transformers' experts run by `implementation`, which takes any width and dtype.

    "batched_mm" needs no values, "eager" takes little memory.
    """
    before = [(module, dict(vars(module))) for module in layer.modules()]
    configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
    kinds = [(config, getattr(config, "_experts_implementation", None)) for config in configs]
    # By id, as modules share configs.
    chosen = {id(config): (config, kind) for config, kind in kinds if kind is not None}
    for config, _ in chosen.values():
        run_experts_by(config, implementation)
    try:
        yield
    finally:
        for config, kind in chosen.values():
            run_experts_by(config, kind)
        # A layer may have cached a table that is on meta.
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def zeroed(layer: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy, on another device, of a layer on meta; all its tensors are zeros."""
    if device == META:
        return layer
    copied = copy.deepcopy(layer)
    for module in copied.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, nn.Parameter(_zeros(parameter, device), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, _zeros(buffer, device))
    return copied


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    size = prod(like.shape) * like.dtype.itemsize
    if device != CPU or not size:
        return torch.zeros_like(like, device=device)
    # Anonymous memory takes no pages until it is written to, however large the layer.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
