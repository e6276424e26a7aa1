"""The command line of a training script for fewer ranks than it was written for, with the same global batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from harness.arguments.configure import read_run_config
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.arguments.training_arguments import TrainingArguments
from harness.arguments.words import without
from harness.atomic import replace_text
from harness.command_line.parsing import parse
from harness.config import ConfigCheck
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.hf.locate import model_directory
from harness.topology.layout import Layout, divisors

ACCUMULATION = "gradient_accumulation_steps"
KINDS = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
CONFIG = "config-of-restart.json"  # in the output directory


def on_fewer_ranks(
    words: Sequence[str], wanted: int, ranks: int, check: ConfigCheck | None
) -> tuple[tuple[str, ...], Layout] | None:
    """Return a command line for at most `ranks` ranks, and its layout; None if no layout keeps the global batch.

    The tensor-parallel size is kept as long as possible, then the number of stages.

    Args:
        words: command line for `wanted` ranks, with the flags of config files in place.
        check: refuses layouts that do not fit the config.
    """
    try:
        script, args, *_ = parse(KINDS, words[1:], prog="", description="", epilog="")
        model = str(model_directory(script.model))
        config = read_run_config(args, world_size=wanted, check=check, model=model)
    except UserError:
        return None
    resolved = config.resolved
    sizes = {name: getattr(resolved, name) for name in ("pp_size", "tp_size", "ep_size", "cp_size")}
    whole = Layout.from_world(wanted, **sizes)
    plain = _with_open_accumulation(words, args, config.document.data)
    for layout in _smaller(whole, ranks):
        flags = _flags(layout, whole, resolved.train_batch)
        changed = (*without(plain, set(flags)), *(word for pair in flags.items() for word in pair))
        if _passes(changed, model, layout, check):
            return changed, layout
    return None


def _with_open_accumulation(given: Sequence[str], args: TrainingArguments, config: JsonObject) -> list[str]:
    """Return the words without gradient accumulation steps, which then follow from the global batch.

    A config that states them is copied into the output directory, with "auto" in their place.
    """
    words = without(given, {"--gradient_accumulation_steps"})
    if config.get(ACCUMULATION, "auto") == "auto":
        return words
    copy = Path(args.output_dir).absolute() / CONFIG
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        replace_text(copy, json.dumps({**config, ACCUMULATION: "auto"}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{copy}: cannot be written: {error.strerror}") from error
    return [*without(words, {"--deepspeed_config"}), "--deepspeed_config", str(copy)]


def _passes(words: Sequence[str], model: str, layout: Layout, check: ConfigCheck | None) -> bool:
    """Return whether a command line passes the checks of a run in this layout."""
    try:
        _, args, *_ = parse(KINDS, words[1:], prog="", description="", epilog="")
        read_run_config(args, world_size=layout.world_size, check=check, model=model)
    except UserError:
        return False
    return True


def _smaller(whole: Layout, ranks: int) -> Iterator[Layout]:
    """Yield the layouts for at most `ranks` ranks, the best one first."""
    for tp_size, cp_size in product(reversed(divisors(whole.tp_size)), reversed(divisors(whole.cp_size))):
        for pp_size in range(whole.pp_size, 0, -1):
            for batch_ranks in range(min(ranks // (tp_size * pp_size * cp_size), whole.world_size), 0, -1):
                dp_size = batch_ranks * cp_size
                neighbours = max(size for size in divisors(dp_size) if size <= whole.ep_data_size)
                ep_size = tp_size * neighbours if whole.ep_size > 1 else 1
                yield Layout(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size, ep_size=ep_size, cp_size=cp_size)


def _flags(layout: Layout, whole: Layout, batch: int) -> dict[str, str]:
    """Return the flags that set a layout in the place of the `whole` run's, and keep the batch."""
    sizes = {"pipeline": layout.pp_size, "tensor": layout.tp_size}
    if whole.ep_size > 1:
        sizes["expert"] = layout.ep_size
    if whole.cp_size > 1:
        sizes["context"] = layout.cp_size
    flags = {f"--{axis}_parallel_size": str(size) for axis, size in sizes.items()}
    return {**flags, "--global_batch_size": str(batch)}
