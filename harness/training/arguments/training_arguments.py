"""The arguments of the Trainer: those of all themes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from harness.config import AutoValues
from harness.training.arguments.batches import BatchArguments
from harness.training.arguments.checkpoints import CheckpointArguments
from harness.training.arguments.layout import LayoutArguments
from harness.training.arguments.model import ModelArguments
from harness.training.arguments.optimizer import OptimizerArguments
from harness.training.arguments.reporting import ReportingArguments
from harness.training.arguments.run import RunArguments
from harness.training.hf_names import SETTINGS, refuse_arguments


@dataclass(kw_only=True)
class TrainingArguments(
    RunArguments,
    BatchArguments,
    OptimizerArguments,
    ModelArguments,
    LayoutArguments,
    CheckpointArguments,
    ReportingArguments,
):
    """How to train. Where the DeepSpeed JSON says "auto", or nothing, the value comes from here."""

    def __new__(cls, **given: Any) -> Self:
        unknown = given.keys() - {item.name for item in fields(cls)}
        refuse_arguments(sorted(unknown), cls.__init__, SETTINGS, cls.__name__)
        return super().__new__(cls, **given)

    def auto_values(self, *, world_size: int, max_steps: int, hidden_size: int | None = None) -> AutoValues:
        """Return what the arguments say about the config's "auto"s."""
        shared = {item.name for item in fields(AutoValues)} & {item.name for item in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        values.update(max_steps=max_steps, warmup_steps=self.warmup(max_steps))
        return AutoValues(**values, world_size=world_size, hidden_size=hidden_size, given=self._given & shared)
