"""The flags of the optimizer and of its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.training.arguments.flags import Flags, flag

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

    learning_rate: float = flag(5e-5, "peak learning rate")
    lr_scheduler_type: str = flag("linear", ", ".join(SCHEDULES), choices=SCHEDULES)
    warmup_steps: float = flag(0, "steps of linear warm-up; below 1: the fraction of all steps", least=0)
    weight_decay: float = flag(0.0, "AdamW's weight decay; not applied to biases and norms")
    adam_beta1: float = flag(0.9, "AdamW's beta1")
    adam_beta2: float = flag(0.999, "AdamW's beta2")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon")
    max_grad_norm: float = flag(1.0, "clip gradients to this norm; 0: no clipping")

    def warmup(self, max_steps: int) -> int:
        """Return the steps of warm-up in a run of `max_steps`."""
        return int(self.warmup_steps if self.warmup_steps >= 1 else self.warmup_steps * max_steps)
