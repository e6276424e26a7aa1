"""One run of the model's forward: what the placeholders in it return, and how it ends early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.hf.layers.inputs import Call, LayerInputs

Handler = Callable[[int, LayerInputs, Tensor], Tensor]
"""What happens at a layer: (index, inputs, hidden state) -> hidden state."""


class ReachedLayer(Exception):
    """Ends a run of the model's forward early, at a layer, with what that layer is given."""

    def __init__(self, hidden: Tensor, inputs: LayerInputs) -> None:
        super().__init__("reached")
        self.hidden = hidden
        self.inputs = inputs


class ForwardRun:
    """One run of the model's forward.

    Args:
        handler: called where the forward arrives at a layer.
        known: name -> tensor that a module or a layer gave before, perhaps on another stage; all others give zeros, or
            None.
        dtype: of the floating zeros.
    """

    def __init__(self, handler: Handler, dtype: torch.dtype, known: Mapping[str, Tensor] | None = None) -> None:
        self.handler = handler
        self.dtype = dtype
        self.known = known or {}
        self._calls: Counter[str] = Counter()

    def next_name(self, module: str) -> str:
        """Return the name of what a module gives at its next call, and count that call."""
        self._calls[module] += 1
        return call_name(module, self._calls[module] - 1)

    def module_output(self, module: str, like: Tensor, _arguments: Call) -> Tensor:
        """Return what a module gives; `like` has the right shape and dtype."""
        name = self.next_name(module)
        if name in self.known:
            return self.known[name]
        return torch.zeros_like(like, dtype=self.dtype if like.is_floating_point() else like.dtype)


def keep_hidden(_index: int, _inputs: LayerInputs, hidden: Tensor) -> Tensor:
    """Handle a layer as if it were not there: it hands on the hidden state."""
    return hidden


def call_name(module: str, call: int) -> str:
    """Return the name of what a module outside the layers gives at one of its calls in a forward."""
    return f"{module}:{call}"
