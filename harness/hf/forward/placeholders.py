"""Modules that take the place of the real ones in a model's forward: of decoder layers, and of the modules around them.

Each answers for the attributes of the module whose place it takes (`attention_type`, `padding_idx`, `weight.dtype`),
because a model's forward may ask for them. What it returns is decided by the function that it is built with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from harness.hf.layers.dry_run import ASKS_FOR_VALUES
from harness.hf.layers.inputs import Call, LayerInputs, LayerOutput
from harness.parallel.values import Argument, Keyword, Positional


class AttributeProxy(nn.Module):
    """A module that has no state of its own and answers for another's attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not registered: its parameters are not ours

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


class PlaceholderLayer(AttributeProxy):
    """Takes the place of a decoder layer.

    Args:
        original: the layer.
        output_of: (inputs, hidden state) -> what the layer returns.
    """

    def __init__(self, original: nn.Module, output_of: Callable[[LayerInputs, Tensor], LayerOutput]) -> None:
        super().__init__(original)
        self._output_of = output_of

    def forward(self, *args: Argument, **kwargs: Argument) -> LayerOutput:
        hidden, inputs = LayerInputs.split(args, kwargs)
        return self._output_of(inputs, hidden)


class PlaceholderModule(AttributeProxy):
    """Takes the place of a module that holds parameters; gives a tensor of the shape that the module would give.

    Args:
        original: the module, on the meta device.
        device: of the tensors that it gives.
        output_of: (an empty tensor of that shape, the arguments) -> the tensor.
    """

    def __init__(self, original: nn.Module, device: torch.device, output_of: Callable[[Tensor, Call], Tensor]) -> None:
        super().__init__(original)
        self._device = device
        self._output_of = output_of
        self._output_shapes: dict[tuple[object, ...], Tensor] = {}

    def forward(self, *args: Argument, **kwargs: Argument) -> Tensor:
        form = tuple(tuple(x.shape) if isinstance(x, Tensor) else repr(x) for x in tree_leaves((args, kwargs)))
        if form not in self._output_shapes:
            self._output_shapes[form] = output_like(self.original, args, kwargs)
        like = torch.empty_like(self._output_shapes[form], device=self._device)
        return self._output_of(like, (args, kwargs))


@torch.no_grad()
def output_like(module: nn.Module, args: Positional, kwargs: Keyword) -> Tensor:
    """Return a tensor on meta of the shape that a module, on the meta device, gives."""
    try:
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        output = module(*args, **kwargs)
        if isinstance(output, Tensor):
            return output
    except ASKS_FOR_VALUES:
        pass
    value: Tensor = args[0].to("meta")
    if isinstance(module, nn.Embedding):
        return torch.empty((*value.shape, module.embedding_dim), device="meta")
    if isinstance(module, nn.Linear):
        return torch.empty((*value.shape[:-1], module.out_features), device="meta")
    return value


def _to_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value
