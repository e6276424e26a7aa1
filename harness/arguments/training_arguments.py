"""The arguments of the Trainer: the flags of all themes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from harness.arguments.precision import computes_in_bf16, is_auto
from harness.arguments.themes.checkpoints import CheckpointArguments
from harness.arguments.themes.flags import ALIASES, require_one_name
from harness.arguments.themes.reporting import ReportingArguments
from harness.arguments.themes.run import RunArguments
from harness.arguments.themes.training import BatchArguments, LayoutArguments, ModelArguments, OptimizerArguments
from harness.config import AutoValues
from harness.errors import refuse_all


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
    """The arguments of a training. They provide every setting that the DeepSpeed JSON omits or sets to "auto".

    Also accepts HuggingFace's older names (`deepspeed`, `evaluation_strategy`), and HuggingFace arguments that request
    behaviour the harness always has (`ddp_timeout=1800`). Raises UserError for any other name, with a remedy.
    """

    @property
    def may_read_checkpoint_back(self) -> bool:
        """Whether the run resumes a named checkpoint that may at first exist only in the second place."""
        return self.push_checkpoints_to is not None and self.resume_from_checkpoint not in (None, "auto")

    @property
    def rank_0_finds_checkpoint(self) -> bool:
        """Whether only rank 0 finds the checkpoint to resume, once all ranks have met: by a search, or by a copy."""
        return self.resume_from_checkpoint == "auto" or self.may_read_checkpoint_back

    @classmethod
    def own_names(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return keyword arguments under the names of the flags, without arguments that have no effect.

        Raises UserError for all unknown arguments together, and for an argument given under two names.
        """
        known = {item.name for item in fields(cls)}
        kept: dict[str, object] = {}
        names: dict[str, str] = {}
        problems: list[str] = []
        for name, value in given.items():
            own = ALIASES.get(name, name)
            # As in HuggingFace. `RunArguments.check` reads the word.
            if own == "resume_from_checkpoint" and isinstance(value, bool):
                value = str(value)
            # None is the default, as HuggingFace's parser passes it.
            if own in known and value is not None:
                require_one_name(names, own, name)
                kept[own] = computes_in_bf16() if is_auto(own, value) else value
            elif own not in known and (advice := cls.advice(name, value, known)) is not None:
                problems.append(f"TrainingArguments takes no {name}: {advice}")
        refuse_all(problems)
        return kept

    @classmethod
    def advice(cls, name: str, value: object, known: Collection[str]) -> str | None:  # noqa: ARG003
        """Return the remedy for an unknown argument; None if it has no effect."""
        return None if value is None else "leave it out"

    def auto_values(self, *, world_size: int, max_steps: int, hidden_size: int | None = None) -> AutoValues:
        """Return the values that replace "auto" in the config."""
        shared = {item.name for item in fields(AutoValues)} & {item.name for item in fields(TrainingArguments)}
        values = {name: getattr(self, name) for name in shared}
        values.update(max_steps=max_steps, warmup_steps=self.warmup(max_steps))
        # None leaves the JSON's interval as it is.
        if "gradient_checkpointing" not in self.given:
            values["gradient_checkpointing"] = None
        return AutoValues(**values, world_size=world_size, hidden_size=hidden_size, given=self.given & shared)
