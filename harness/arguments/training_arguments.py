"""The arguments of the Trainer: those of all themes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from harness.arguments.flags import asked_for
from harness.arguments.themes.batches import BatchArguments
from harness.arguments.themes.checkpoints import CheckpointArguments
from harness.arguments.themes.layout import LayoutArguments
from harness.arguments.themes.model import ModelArguments
from harness.arguments.themes.optimizer import OptimizerArguments
from harness.arguments.themes.reporting import ReportingArguments
from harness.arguments.themes.run import RunArguments
from harness.arguments.words import own_arguments
from harness.config import AutoValues


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

    if not TYPE_CHECKING:  # a type checker sees the fields alone

        def __init__(self, output_dir: object = None, **given: object) -> None:
            """Take HuggingFace's other flags too, where they ask for what is done in any case."""
            said = given if output_dir is None else {"output_dir": output_dir, **given}
            given = own_arguments(said, fields(self))
            object.__setattr__(self, "_asked", asked_for(type(self), {**dict.fromkeys(said), **given}))
            for item in fields(self):
                setattr(self, item.name, given.get(item.name, item.default))
            self.__post_init__()

    def auto_values(self, *, world_size: int, max_steps: int, hidden_size: int | None = None) -> AutoValues:
        """Return what the arguments say about the config's "auto"s."""
        shared = {item.name for item in fields(AutoValues)} & {item.name for item in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        values.update(max_steps=max_steps, warmup_steps=self.warmup(max_steps))
        return AutoValues(**values, world_size=world_size, hidden_size=hidden_size, given=self.given & shared)
