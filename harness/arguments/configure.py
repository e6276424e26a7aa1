"""Load the config of a run and resolve it against the arguments. Imports no torch, so it can run first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.arguments import TrainingArguments
from harness.arguments.themes.reporting import monitor_sections, require_packages, within
from harness.config import AutoValues, ConfigCheck, Resolved
from harness.config.resolving.resolve import complete, read, resolve_before_data
from harness.config.values.config_file import ConfigFile
from harness.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The config of a run, read and checked once.

    Attributes:
        document: the JSON as written.
        values: the arguments that replace "auto".
        resolved: the settings, still with "auto" where it depends on data or model.
    """

    document: ConfigFile
    values: AutoValues
    resolved: Resolved

    def for_data(
        self,
        args: TrainingArguments,
        samples: int | None,
        hidden_size: int | None = None,
        *,
        step: int = 0,
        trained_samples: int = 0,
    ) -> tuple[Resolved, int]:
        """Complete the settings that depend on data and model; return the config and the number of steps.

        Args:
            args: the arguments with which the config was read.
            samples: length of the training data; None without data (max_steps then counts, or 1).
            hidden_size: the model's hidden size, for ZeRO's "auto" bucket sizes.
            step, trained_samples: steps done by a resumed run, and the samples of these steps.

        Raises:
            UserError: `args` differ from the arguments with which the config was read.
        """
        values = _auto_values(args, self.values.world_size)
        # `resolved` already holds values of those arguments: a later change would be ignored without a word.
        if _before_data(values) != _before_data(self.values):
            raise UserError("the config was read with other arguments: give read_run_config the arguments of the run")
        steps = max_steps(args, samples, self.resolved.train_batch, step, trained_samples)
        warmup_steps = args.warmup(steps)
        values = replace(values, max_steps=steps, warmup_steps=warmup_steps, hidden_size=hidden_size)
        return complete(self.resolved, values), steps


def read_run_config(
    args: TrainingArguments, *, world_size: int, check: ConfigCheck | None, model: str | None = None
) -> RunConfig:
    """Read and check the config of a run.

    Args:
        world_size: number of ranks.
        check: refuses a wrong config; None to check nothing.
        model: a preset's name or a directory, whose heads and layers the layout must fit; None if unknown.

    Raises:
        ConfigError: the config is wrong, cannot run on so many ranks, or contradicts an argument.
    """
    document = read_config(args.deepspeed_config, check)
    values = _auto_values(args, world_size)
    resolved = resolve_before_data(
        document, values, check=check, model=model, allow_ignored_keys=args.allow_ignored_keys
    )
    # Refused here, because monitors and the profiler's file are opened only after the model has been built.
    require_packages(monitor_sections(args, args.output_dir, resolved.config))
    file = resolved.config.get("flops_profiler", {}).get("output_file")
    if isinstance(file, str):
        within(args.output_dir, file, "flops_profiler.output_file")
    return RunConfig(document=document, values=values, resolved=resolved)


def _auto_values(args: TrainingArguments, world_size: int) -> AutoValues:
    """Return the values that replace "auto" before the data is known."""
    # 1 step for now, as -1 stands for a number of epochs, whose steps only the data tells.
    return args.auto_values(world_size=world_size, max_steps=max(1, args.max_steps), hidden_size=None)


def _before_data(values: AutoValues) -> AutoValues:
    """Return the values that do not depend on the data: all but the numbers of steps, which may be set later."""
    return replace(values, max_steps=1, warmup_steps=0, given=frozenset())


def read_config(config: str | Mapping[str, object] | None, check: ConfigCheck | None) -> ConfigFile:
    """Return the DeepSpeed JSON from a file, a preset's name or a dict; for None, all settings are "auto"."""
    if config is None:
        return read({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, check, path="")
    return read(config, check)


def max_steps(
    args: TrainingArguments, samples: int | None, global_batch: int, step: int = 0, trained_samples: int = 0
) -> int:
    """Return the number of steps by --max_steps or --num_train_epochs. Raises UserError if it is below 1.

    A resumed run may have another batch size: its first `step` steps used `trained_samples`.
    """
    if args.max_steps > 0 or samples is None:
        return max(1, args.max_steps)
    # The steps done may have used more or fewer samples than as many steps with today's batch.
    more = trained_samples - step * global_batch
    steps = max(step, math.ceil((args.num_train_epochs * samples - more) / global_batch))
    if steps < 1:
        raise UserError(
            f"--num_train_epochs {args.num_train_epochs}: gives no step: give a positive number or --max_steps"
        )
    return steps
