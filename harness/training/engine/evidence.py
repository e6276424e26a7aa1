"""What a rank sees of a step that is not finite, and where it must have started.

A loss that is not finite is given a gradient that is not finite either, so that one question decides about a step: is
the gradient's norm finite? Every optimizer here answers it before it updates, and the answer is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.topology.agreement import spell_ranks
from harness.training.engine.losses import Loss, Outputs, Targets


class GuardedLoss:
    """A loss that remembers whether it was finite; with `spoils` its gradient is NaN where it was not.

    Attributes:
        observer: called with the outputs and targets of each micro-batch, if set.
        release: lets go of outputs that an engine keeps; called when the loss is known.
    """

    def __init__(self, loss: Loss, *, spoils: bool) -> None:
        self.loss = loss
        self.spoils = spoils
        self.reports = loss.reports
        self.count, self.units, self.parts = loss.count, loss.units, loss.parts
        self.observer: Callable[[Outputs, Targets], None] | None = None
        self.release: Callable[[], None] = lambda: None
        self._finite: Tensor | None = None

    def reset(self) -> None:
        """Forget the losses that were seen."""
        self._finite = None

    @property
    def finite(self) -> bool:
        """Whether all losses since the last reset were finite. Waits for the device."""
        return self._finite is None or bool(self._finite)

    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Return the loss unchanged, and keep whether it is finite."""
        if self.observer is not None:
            self.observer(outputs, targets)
        value = self.loss(outputs, targets)
        self.release()
        if value.requires_grad:
            finite = value.detach().isfinite()
            self._finite = finite if self._finite is None else self._finite & finite
            if self.spoils:
                value.register_hook(lambda gradient: torch.where(finite, gradient, float("nan")))
        return value


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one rank has seen of a step.

    Attributes:
        outputs, loss, gradients: whether what its stage handed on, its losses, and the gradients that it got for what
            it handed on were finite.
    """

    rank: int
    stage: int
    loss: bool
    outputs: bool = True
    gradients: bool = True


def origin(seen: Sequence[Evidence], *, loss: bool) -> str:
    """Return the stage where something first was not finite, with its ranks, in words.

    Forward, that is the first stage that handed on such values, or the last one if none did. Backward, it is the last
    stage that passed on other gradients than it got: the lowest one that got finite ones.
    """
    last = max(each.stage for each in seen)
    if loss:
        stage = min((each.stage for each in seen if not each.outputs), default=last)
        ranks = [each.rank for each in seen if each.stage == stage and not (each.outputs and each.loss)]
    else:
        got = {each.stage for each in seen if not each.gradients}
        stage = min(set(range(last + 1)) - got, default=last)
        ranks = []
    ranks = ranks or [each.rank for each in seen if each.stage == stage]
    return f"first on stage {stage}, {spell_ranks(ranks)}"
