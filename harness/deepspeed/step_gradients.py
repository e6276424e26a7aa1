"""Find the gradients of a step where the engine's optimizer looks for them.

An optimizer reads a gradient in one of three places: `grad`, its own flat tensor (`FlatOptimizer`), or `grad_accum`
(DeepSpeed's ZeRO-1, if gradients are accumulated in another dtype than the parameters'). It silently ignores a gradient
anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from harness.deepspeed.flat_optimizer import FlatOptimizer
from harness.deepspeed.flat_tensors import EngineOptimizer


class StepGradients:
    """The gradients that an engine's optimizer will read in its next step."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self._optimizer = optimizer
        self._accumulates = bool(getattr(optimizer, "use_grad_accum_attribute", False))
        self._attribute = "grad_accum" if self._accumulates else "grad"
        self._flat: dict[int, tuple[int, int]] = {}
        if isinstance(optimizer, FlatOptimizer):
            groups = enumerate(optimizer.bf16_groups)
            self._flat = {id(p): (group, at) for group, members in groups for at, p in enumerate(members)}

    def found(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient, of the parameter's shape, for in-place changes; None if this rank computed none."""
        position = self._flat.get(id(parameter))
        if position is None:
            found: Tensor | None = getattr(parameter, self._attribute, None)
            return found
        group, at = position
        if not self._optimizer.fp32_groups_has_gradients[group][at]:
            return None
        return self._in_flat(group, at).view_as(parameter)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient, of the parameter's shape; create zeros if this rank computed none."""
        found = self.found(parameter)
        if found is not None:
            return found
        # Another rank may have one, and then all ranks must take part in the sum.
        position = self._flat.get(id(parameter))
        if position is not None:
            group, at = position
            self._optimizer.fp32_groups_has_gradients[group][at] = True
            # Zeroed here, because nothing clears the sums of an earlier step.
            return self._in_flat(group, at).zero_().view_as(parameter)
        dtype = self._optimizer.gradient_accumulation_dtype if self._accumulates else parameter.dtype
        found = torch.zeros_like(parameter, dtype=dtype)
        setattr(parameter, self._attribute, found)
        return found

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Create a zero gradient for each of these parameters without one."""
        for parameter in parameters:
            self.of(parameter)

    def _in_flat(self, group: int, at: int) -> Tensor:
        gradient: Tensor = self._optimizer.fp32_groups_gradients[group][at]
        return gradient


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this stage that have gradients, in the module's order."""
    return [p for p in module.parameters() if p.requires_grad and p.numel()]
