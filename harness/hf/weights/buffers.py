"""Values that a model's constructor computes, and that neither a checkpoint nor `_init_weights` holds.

They are those of buffers, and of a few small parameters (a learnt scale that begins at 1, say). On the meta device they
are lost. They are found by what initialisation leaves as it was, and made by building the model once more with real
buffers and small parameters while the others stay on meta: no memory is taken for weights, no time for their initial
values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.parallel.generators import own_generators

SMALL = 1 << 18  # values of a parameter that is kept as the constructor makes it


def mark_unfilled(tensors: Iterable[Tensor]) -> None:
    """Fill real floating tensors with NaN, so that those that initialisation passes by can be told."""
    for tensor in tensors:
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.fill_(float("nan"))


def is_unfilled(tensor: Tensor) -> bool:
    """Whether a tensor is still as `mark_unfilled` left it."""
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isnan().all())


def constructed(model: PreTrainedModel, seed: int, shape: Sequence[int] = ()) -> dict[str, Tensor]:
    """Return tensors of a model as its constructor makes them, on the CPU, by name: buffers, small parameters and
    those of one shape."""
    with _large_parameters_on_meta(tuple(shape)), own_generators(seed):
        built: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    tensors = (*built.named_parameters(remove_duplicate=False), *built.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors if not tensor.is_meta}


@contextmanager
def _large_parameters_on_meta(kept: tuple[int, ...]) -> Iterator[None]:
    """Let parameters that modules are given in here lie on the meta device, but small ones and those of a shape."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > SMALL and tuple(parameter.shape) != kept:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    # a patch, which types do not know
    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
