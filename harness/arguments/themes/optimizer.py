"""The flags of the optimizer and of its schedule."""

import math
from dataclasses import dataclass
from typing import ClassVar

from harness.arguments.flags import Flags, flag
from harness.config.values.arguments import OPTIMIZERS, AutoValues
from harness.errors import UserError

# transformers' schedules that need nothing but the number of steps and of warm-up steps
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


@dataclass(kw_only=True)
class OptimizerArguments(Flags):
    """How weights move, where the DeepSpeed JSON says "auto" or nothing."""

    TITLE: ClassVar[str] = "Optimizer and schedule"

    learning_rate: float = flag(AutoValues.learning_rate, "peak learning rate", least=0)
    lr_scheduler_type: str = flag(AutoValues.lr_scheduler_type, ", ".join(SCHEDULES), choices=SCHEDULES)
    warmup_steps: float = flag(
        AutoValues.warmup_steps, "steps of linear warm-up; below 1: the fraction of all steps", least=0
    )
    warmup_ratio: float | None = flag(None, "the fraction of all steps, as warmup_steps below 1", least=0)
    optim: str = flag(AutoValues.optim, f"{', '.join(OPTIMIZERS)}; others as optimizer.type in the DeepSpeed JSON")
    weight_decay: float = flag(
        AutoValues.weight_decay, "AdamW's weight decay; not applied to biases and norms", least=0
    )
    adam_beta1: float = flag(AutoValues.adam_beta1, "AdamW's beta1", least=0)
    adam_beta2: float = flag(AutoValues.adam_beta2, "AdamW's beta2", least=0)
    adam_epsilon: float = flag(AutoValues.adam_epsilon, "AdamW's epsilon", least=0)
    max_grad_norm: float = flag(AutoValues.max_grad_norm, "clip gradients to this norm; 0: no clipping", least=0)

    def warmup(self, max_steps: int) -> int:
        """Return the steps of warm-up in a run of `max_steps`."""
        fraction = self.warmup_steps if self.warmup_ratio is None else self.warmup_ratio
        return int(fraction) if self.warmup_ratio is None and fraction >= 1 else math.ceil(fraction * max_steps)

    def check(self) -> None:
        """Refuse two lengths of the warm-up, betas of 1, and an optimizer that only the DeepSpeed JSON can name."""
        if self.warmup_ratio is not None and self.warmup_steps:
            raise UserError("--warmup_ratio and --warmup_steps are both given: give one of them")
        if self.warmup_ratio is not None and self.warmup_ratio > 1:
            raise UserError(f"--warmup_ratio {self.warmup_ratio}: must be at most 1")
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(self, name) >= 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be below 1")
        if self.optim not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise UserError(f"--optim {self.optim}: give {known}, or name another as optimizer.type in the JSON")
