"""Whether what a pipeline stage hands on, and the gradients it gets for that, are finite.

The answers stay on the device until they are asked for, so watching waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.parallel.values import Value


class FiniteWatch:
    """Watches the outputs of one stage."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._outputs: Tensor | None = None
        self._gradients: Tensor | None = None

    @property
    def outputs(self) -> bool:
        """Whether all outputs since the last reset were finite. Waits for the device."""
        return self._outputs is None or bool(self._outputs)

    @property
    def gradients(self) -> bool:
        """Whether all gradients of these outputs were finite. Waits for the device."""
        return self._gradients is None or bool(self._gradients)

    def see(self, output: Value) -> None:
        """Watch a tensor, or a tuple of tensors, and the gradients that will arrive for them."""
        if not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._outputs = _both(self._outputs, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._see_gradient)

    def _see_gradient(self, gradient: Tensor) -> None:
        self._gradients = _both(self._gradients, gradient)


def _both(known: Tensor | None, tensor: Tensor) -> Tensor:
    finite = tensor.detach().isfinite().all()
    return finite if known is None else known & finite
