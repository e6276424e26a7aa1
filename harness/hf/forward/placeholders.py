"""What stands in a frame in the place of real modules: stubs of decoder layers, stand-ins of the modules around them.

Both answer for attributes of the module whose place they take (`attention_type`, `padding_idx`, `weight.dtype`),
because a model's forward may ask for them. What they give is said by the run of the forward that is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from harness.hf.forward.dry_run import ASKS_FOR_VALUES
from harness.hf.forward.layer_inputs import LayerInputs

if TYPE_CHECKING:
    from harness.hf.forward.outer_forward import OuterForward

Handler = Callable[[int, LayerInputs, Tensor], Tensor]
"""What a layer's stub does: (index, arguments, hidden state) -> hidden state."""


class ReachedLayer(Exception):
    """Ends a run of the model's forward early, at a layer, with what that layer is given."""

    def __init__(self, hidden: Tensor, call: LayerInputs) -> None:
        super().__init__("reached")
        self.hidden = hidden
        self.call = call


class ForwardRun:
    """One run of the model's forward.

    Args:
        handler: called where the forward arrives at a layer.
        given: name -> tensor, of what modules and layers gave on another stage; all else is zeros, or None.
        dtype: of the floating zeros.
    """

    def __init__(self, handler: Handler, dtype: torch.dtype, given: Mapping[str, Tensor] | None = None) -> None:
        self.handler = handler
        self.dtype = dtype
        self.given = given or {}
        self._calls: Counter[str] = Counter()

    def next_name(self, module: str) -> str:
        """The name of what a module gives at its next call."""
        self._calls[module] += 1
        return call_name(module, self._calls[module] - 1)

    def stand_in(self, module: str, like: Tensor, arguments: Any) -> Tensor:
        """What the stand-in of a module gives; `like` has the right shape and dtype."""
        name = self.next_name(module)
        if name in self.given:
            return self.given[name]
        return torch.zeros_like(like, dtype=self.dtype if like.is_floating_point() else like.dtype)


def call_name(module: str, call: int) -> str:
    """The name of what a module of the prologue gives at one of its calls in a forward."""
    return f"{module}:{call}"


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
    """In the place of a decoder layer: hands its arguments to the frame, which says what it returns."""

    def __init__(self, original: nn.Module, index: int, outer: OuterForward) -> None:
        super().__init__(original)
        self.__dict__.update(index=index, outer=outer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, call = LayerInputs.split(args, kwargs)
        return self.outer.at_layer(self.index, call, hidden)


class PlaceholderModule(AttributeProxy):
    """In the place of a module that holds parameters: gives a tensor of the shape that the module would give."""

    def __init__(self, original: nn.Module, name: str, outer: OuterForward) -> None:
        super().__init__(original)
        self.__dict__.update(name=name, outer=outer, forms={})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        form = tuple(tuple(x.shape) if isinstance(x, Tensor) else repr(x) for x in tree_leaves((args, kwargs)))
        if form not in self.forms:
            self.forms[form] = output_like(self.original, args, kwargs)
        like = torch.empty_like(self.forms[form], device=self.outer.device)
        return self.outer.at_module(self.name, like, (args, kwargs))


@torch.no_grad()
def output_like(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A tensor on meta of the shape that a module, on the meta device, gives."""
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


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
