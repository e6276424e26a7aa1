"""The flags of what a run says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.errors import UserError
from harness.training.arguments.flags import Flags, flag


@dataclass(kw_only=True)
class ReportingArguments(Flags):
    """When to log, and where to."""

    TITLE: ClassVar[str] = "Logs"

    logging_strategy: str = flag(
        "steps",
        "log every logging_steps steps, at the end of each epoch, or not at all",
        choices=("no", "steps", "epoch"),
    )
    logging_steps: int = flag(10, "steps between log events", least=1)
    report_to: str = flag("none", "none, or a comma-separated list of tensorboard, wandb, csv")
    run_name: str | None = flag(None, "name of the run in TensorBoard and W&B (default: run; the output_dir's name)")

    def reporters(self) -> list[str]:
        """Return the monitors that `report_to` names."""
        return [name.strip() for name in self.report_to.split(",") if name.strip() not in ("", "none")]

    def check(self) -> None:
        """Refuse a monitor that there is not."""
        unknown = set(self.reporters()) - {"tensorboard", "wandb", "csv"}
        if unknown:
            raise UserError(
                f"--report_to {self.report_to}: {sorted(unknown)[0]} is not one of tensorboard, wandb, csv, none"
            )
