"""Keys that have no effect in a run of the harness and are not passed to DeepSpeed.

The harness itself reads the data, shards the model, builds the optimizer and writes the model, so DeepSpeed's own keys
for these have no effect. Some would break a run: `autotuning` ends it after a few steps, `hybrid_engine` replaces the
engine.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup, name_of
from harness.optimizers import find

_TABLE: JsonObject = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
IDLE: dict[str, str] = _TABLE["idle"]
"""Key without effect in the harness -> the reason."""
_ACCELERATED: list[str] = _TABLE["accelerated"]
"""Switches for kernels that DeepSpeed has only for accelerators."""
ON_A_CPU = "run on an accelerator, or remove it"
"""The remedy for `accelerated` features."""
_DROPPED: list[str] = _TABLE["dropped"]
"""Keys and sections that the harness does not pass on to DeepSpeed."""


def accelerated(config: Mapping[str, object]) -> dict[str, str]:
    """Return features that need an accelerator, by pointer."""
    found = {pointer: name_of(pointer) for pointer in _ACCELERATED if str(lookup(config, pointer)).lower() == "true"}
    name = lookup(config, "/optimizer/type")
    optimizer = find(str(name))
    offloaded = lookup(config, "/zero_optimization/offload_optimizer/device") == "cpu"
    if optimizer is not None and not optimizer.runs_on_cpu(offloaded=offloaded):
        found = {"/optimizer/type": f"optimizer.type {name}"} | found
    return {
        pointer: f"{feature}: DeepSpeed supports it on accelerators only, not on a CPU"
        for pointer, feature in found.items()
    }


def without_idle(config: Mapping[str, object]) -> JsonObject:
    """Return a copy without the keys that would break a run."""
    kept = copy.deepcopy(dict(config))
    for pointer in _DROPPED:
        parent, name = pointer.rsplit("/", 1)
        section = lookup(kept, parent) if parent else kept
        if isinstance(section, dict):
            section.pop(name, None)
    if "optimizer" not in kept:
        # The harness's default optimizer works with offloaded parameters too, so DeepSpeed need not compile its own.
        kept["zero_force_ds_cpu_optimizer"] = False
    return kept
