"""The arguments of the Trainer: those of all themes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from harness.arguments.command_line import own_arguments
from harness.arguments.flags import noting_given
from harness.arguments.themes.checkpoints import CheckpointArguments
from harness.arguments.themes.reporting import ReportingArguments
from harness.arguments.themes.run import RunArguments
from harness.arguments.themes.training import BatchArguments, LayoutArguments, ModelArguments, OptimizerArguments
from harness.config import AutoValues
from harness.uncaught import show_in_one_line


@noting_given
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
    """How to train. Where the DeepSpeed JSON says "auto", or nothing, the value comes from here.

    A program may also pass HuggingFace's other names (`deepspeed`, `evaluation_strategy`), and flags of HuggingFace's
    that ask for what is done in any case (`ddp_timeout=1800`). UserError for every other name, with what to write.
    """

    @classmethod
    def own_names(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return keyword arguments by the names of the flags, without those that ask for nothing."""
        show_in_one_line()  # what is refused here ends most programs
        return own_arguments(given, fields(cls))

    def auto_values(self, *, world_size: int, max_steps: int, hidden_size: int | None = None) -> AutoValues:
        """Return what the arguments say about the config's "auto"s."""
        shared = {item.name for item in fields(AutoValues)} & {item.name for item in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        values.update(max_steps=max_steps, warmup_steps=self.warmup(max_steps))
        return AutoValues(**values, world_size=world_size, hidden_size=hidden_size, given=self.given & shared)
