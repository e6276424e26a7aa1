"""Run a layer without its weights, to see what it returns.

On the meta device there are shapes alone. A forward that looks at values (experts in a loop over those that a token
chose) cannot run there; it runs on zeros that take no memory, as a whole layer of a large model may not fit anywhere.
"""

from __future__ import annotations

import copy
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from harness.hf.layers.inputs import LayerInputs
from harness.parallel.draws import DrawnShapes
from harness.parallel.plans.experts import run_experts_by

META, CPU = torch.device("meta"), torch.device("cpu")
# what a forward raises that asks tensors on meta for their values
ASKS_FOR_VALUES = (NotImplementedError, RuntimeError, ValueError)
# what a forward raises that asks a placeholder for what it cannot give
CANNOT_RUN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
# Linux then grants more than it has; Python names the flag only in later versions
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

Result = TypeVar("Result")


@torch.no_grad()
def dry_run(
    layer: nn.Module, inputs: LayerInputs, hidden: Tensor, run: Callable[[nn.Module, LayerInputs, Tensor], Result]
) -> Result:
    """Return `run(layer, inputs, hidden)` with a layer from the meta device, where it runs with the least memory.

    Where it runs on no device, the last error is raised.
    """

    def attempt(device: torch.device) -> Result:
        with _shapes_alone(layer) if device == META else nullcontext():
            return run(zeroed(layer, device), inputs.mapped(lambda tensor: tensor.to(device)), hidden.to(device))

    *first, last = dict.fromkeys((META, CPU, hidden.device))
    for device in first:
        try:
            return attempt(device)
        except ASKS_FOR_VALUES:
            continue
    return attempt(last)


@torch.no_grad()
def drawn_shapes(layer: nn.Module, inputs: LayerInputs, hidden: Tensor) -> list[torch.Size]:
    """Return the shapes of the random numbers that a layer on the meta device draws, up to where it looks at values."""
    with DrawnShapes() as drawn, suppress(*ASKS_FOR_VALUES), _shapes_alone(layer):
        inputs.mapped(lambda tensor: tensor.to(META)).apply(layer, hidden.to(META))
    return drawn.shapes


@contextmanager
def _shapes_alone(layer: nn.Module) -> Iterator[None]:
    """Let transformers' experts do what needs no values and takes any dtype: all tokens at once.

    Afterwards the layer is as before: a table that its forward has made on meta and kept would be of no use.
    """
    before = [(module, dict(vars(module))) for module in layer.modules()]
    configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
    chosen = {id(config): (config, kind) for config in configs if (kind := _experts_of(config)) is not None}
    for config, _ in chosen.values():
        run_experts_by(config, "batched_mm")
    try:
        yield
    finally:
        for config, kind in chosen.values():
            run_experts_by(config, kind)
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _experts_of(config: object) -> str | None:
    return getattr(config, "_experts_implementation", None)


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
    """Return zeros. On the CPU they take no memory until they are written to: their pages are not yet assigned."""
    size = prod(like.shape) * like.dtype.itemsize
    if device != CPU or not size:
        return torch.zeros_like(like, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
