"""The config of a run: load, check, resolve against the arguments. No torch, so that it can be done before all else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.arguments import TrainingArguments
from harness.arguments.themes.reporting import monitor_sections, require_inside, require_packages
from harness.config import AutoValues, Document, Resolved, load, resolve
from harness.config.resolving.resolve import fill
from harness.config.text.document import from_values
from harness.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The config of a run, read and checked once.

    Attributes:
        document: as it is written.
        values: what the arguments say about "auto".
        resolved: all that does not depend on the data: layout, batch, precision, ZeRO stage.
    """

    args: TrainingArguments
    document: Document
    values: AutoValues
    resolved: Resolved

    def for_data(self, samples: int | None, hidden_size: int | None = None) -> tuple[Resolved, int]:
        """Fill in what depends on data and model, and return the config with the number of steps; runs no rules.

        Args:
            samples: length of the training data, None if there is none (the steps are then max_steps or 1).
            hidden_size: of the model, for ZeRO's "auto" bucket sizes.
        """
        steps = max_steps(self.args, samples, self.resolved.train_batch)
        warmup_steps = self.args.warmup(steps)
        values = replace(self.values, max_steps=steps, warmup_steps=warmup_steps, hidden_size=hidden_size)
        return fill(self.document, values), steps


def read_run_config(args: TrainingArguments, *, world_size: int, model: str | None = None) -> RunConfig:
    """Read and check the config of a run.

    Args:
        world_size: ranks that run.
        model: a preset's name or a directory, whose heads and layers the layout must fit; None: not looked at.

    Raises:
        ConfigError: the config is wrong, cannot run on so many ranks, or contradicts an argument.
    """
    document = read_config(args.deepspeed_config)
    values = args.auto_values(world_size=world_size, max_steps=max(1, args.max_steps), hidden_size=None)
    resolved = resolve(document, values, model=model, allow_ignored_keys=args.allow_ignored_keys)
    require_packages(monitor_sections(args, args.output_dir, resolved.config))
    require_inside(args.output_dir, resolved.config)
    return RunConfig(args=args, document=document, values=values, resolved=resolved)


def read_config(config: str | Mapping[str, object] | None) -> Document:
    """Return the DeepSpeed JSON: a file, a preset's name, or what a program made; absent: everything from the
    arguments."""
    if isinstance(config, str):
        return load(config)
    everything = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    return from_values(everything if config is None else config)


def max_steps(args: TrainingArguments, samples: int | None, global_batch: int) -> int:
    """Return the number of steps: as given, or as many as the epochs take."""
    if args.max_steps > 0 or samples is None:
        return max(1, args.max_steps)
    steps = math.ceil(args.num_train_epochs * samples / global_batch)
    if steps < 1:
        raise UserError(
            f"--num_train_epochs {args.num_train_epochs}: gives no step: give a positive number or --max_steps"
        )
    return steps
