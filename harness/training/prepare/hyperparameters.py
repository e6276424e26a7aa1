"""What decides about the steps to come, under the names that a user knows; and what of it a resumed run changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.arguments import TrainingArguments
from harness.config import Resolved
from harness.config.values.json_object import JsonObject

OF_ADAMW = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
NAMES = {  # of values in the JSON that are arguments otherwise
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas.0": "adam_beta1",
    "optimizer.params.betas.1": "adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "gradient_clipping": "max_grad_norm",
}
SECTIONS = ("optimizer", "scheduler", "fp16", "gradient_clipping", "train_batch_size")


def hyperparameters(args: TrainingArguments, resolved: Resolved, max_steps: int) -> JsonObject:
    """Return what decides about the steps that are still to come, under the names that a user knows."""
    config = resolved.config
    values = {} if "optimizer" in config else {name: getattr(args, name) for name in OF_ADAMW}
    values["learning_rate"] = args.learning_rate  # where the JSON has an optimizer without one, too
    if "scheduler" not in config:
        values.update(lr_scheduler_type=args.lr_scheduler_type, warmup_steps=args.warmup(max_steps))
        values.update(max_steps=max_steps)
    for section in SECTIONS:
        if section in config:
            values.update({NAMES.get(name, name): value for name, value in _flat(section, config[section])})
    values.pop("optimizer.type", None)  # another one is refused
    return values


def changes(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """One line for each value that a checkpoint was saved with and this run has otherwise."""
    lines = []
    for name in (*saved, *(name for name in now if name not in saved)):
        before, after = (_spelled(values, name) for values in (saved, now))
        if before != after and saved.get(name, before) != now.get(name, after):  # 1 is 1.0
            uses = f", which uses {after}" if name in now else ""
            lines.append(f"{name}: {before} in the checkpoint, {after} in this run{uses}")
    return lines if saved else []


def _spelled(values: Mapping[str, object], name: str) -> str:
    return str(values[name]) if name in values else "not set"


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Return the single values below a section, each under its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value
