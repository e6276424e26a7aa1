"""The flags of evaluation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.errors import UserError
from harness.training.arguments.flags import Flags, flag


@dataclass(kw_only=True)
class CheckpointArguments(Flags):
    """When to evaluate and when to save."""

    TITLE: ClassVar[str] = "Evaluation and checkpoints"

    eval_steps: int | None = flag(None, "steps between evaluations (default: no evaluation during training)", least=1)
    save_steps: int = flag(500, "steps between checkpoints; the last step also saves one; 0: no checkpoints", least=0)
    save_seconds: float | None = flag(None, "also save when so many seconds have passed since the last checkpoint")
    save_total_limit: int | None = flag(None, "number of newest checkpoints to keep (default: all)", least=1)

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints."""
        return self.save_steps > 0 or self.save_seconds is not None

    def check(self) -> None:
        """Refuse an interval without length."""
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise UserError(f"--save_seconds {self.save_seconds}: must be above 0")
