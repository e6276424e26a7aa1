"""The interface through which layers and epilogue compute a mixture of experts' router loss.

The logits of the routers travel with the hidden state from stage to stage, and the epilogue adds the model's own loss
of them. `harness/extras/router_loss.py` reads both from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.payload import ForwardOutput
from harness.hf.layers.call import LayerOutput


class RouterCapture(Protocol):
    """Collects router logits from the layers, and passes them to the model's own forward at the end.

    They are equal on all tensor-parallel ranks.
    """

    @property
    def layers(self) -> Collection[int]:
        """The indices of the layers with routers."""

    @property
    def coefficient(self) -> float:
        """The factor of the router loss in the model's own loss."""

    def state_name(self, index: int) -> str:
        """Return the name of the state that carries layer `index`'s router logits."""

    def has_router(self, block: nn.Module, name: str) -> bool:
        """Return whether the module `name` of a layer is or contains a router."""

    def run(self, layer: nn.Module, call: Callable[[], LayerOutput]) -> tuple[LayerOutput, Tensor]:
        """Run `layer` by `call`; return its output and its stacked router logits [routers, ...]."""

    def finish(
        self, model: nn.Module, taken: Sequence[Tensor], forward: Callable[..., ForwardOutput]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [batch, sequence, vocabulary] and the router loss (a scalar) of `model`.

        Args:
            taken: the router logits of each of `layers`.
            forward: completes the forward of `model`; takes further arguments for it.
        """


FindRouters: TypeAlias = Callable[[OuterForward, str | None], RouterCapture | None]
"""Finds the routers of a model with a router loss of its own; None for any other model.

Arguments: the model's forward around its layers, and the name of the module that computes the logits.
"""
