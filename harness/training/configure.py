"""The config of a run: load, check, resolve against the arguments. No torch, so that it can be done before all else."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.config import ConfigError, Document, Resolved, Severity, check, load, resolve
from harness.config.errors import UserError
from harness.training.arguments import TrainingArguments


def configure(
    args: TrainingArguments, *, world_size: int, samples: int | None = None, hidden_size: int | None = None
) -> tuple[Resolved, int]:
    """The resolved config and the number of steps.

    Args:
        world_size: ranks that run.
        samples: length of the training data, None if not yet known (the steps are then max_steps or 1).
        hidden_size: of the model, for ZeRO's "auto" bucket sizes.

    Raises:
        ConfigError: the config is wrong, cannot run on so many ranks, or contradicts an argument.
    """
    config = _read(args)
    if isinstance(config, Document):
        errors = [found for found in check(config, world_size=world_size) if found.severity is Severity.ERROR]
        if errors:
            raise ConfigError(errors)
    values = args.auto_values(world_size=world_size, max_steps=max(1, args.max_steps), hidden_size=hidden_size)
    resolved = resolve(config, values)
    steps = max_steps(args, samples, resolved.train_batch)
    values = replace(values, max_steps=steps, warmup_steps=args.warmup(steps))
    return resolve(config, values), steps


def max_steps(args: TrainingArguments, samples: int | None, global_batch: int) -> int:
    """Steps of the run: as given, or as many as the epochs take."""
    if args.max_steps > 0 or samples is None:
        return max(1, args.max_steps)
    steps = math.ceil(args.num_train_epochs * samples / global_batch)
    if steps < 1:
        raise UserError(
            f"--num_train_epochs {args.num_train_epochs}: not one step; give a positive number or --max_steps"
        )
    return steps


def _read(args: TrainingArguments) -> Document | dict[str, object]:
    if args.deepspeed_config is None:
        return {}
    if isinstance(args.deepspeed_config, str):
        return load(args.deepspeed_config)
    return dict(args.deepspeed_config)
