"""Keys that have no effect in a run of the harness, and are not handed on to DeepSpeed.

The harness reads the data, cuts the model, builds the optimizer and writes the model itself, so keys for DeepSpeed's
own ways of doing so have no effect. Some of them would break a run: `autotuning` ends it after a few steps,
`hybrid_engine` replaces the engine.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup, name_of

_TABLE: JsonObject = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
IDLE: dict[str, str] = _TABLE["idle"]
"""Keys without effect in the harness, each with the reason."""
_ACCELERATED: dict[str, list[str]] = _TABLE["accelerated"]
"""Keys that need kernels that DeepSpeed has only for accelerators, and the values that need them."""
_DROPPED: list[str] = _TABLE["dropped"]
"""Keys and sections that the harness does not pass on to DeepSpeed."""


def accelerated(config: Mapping[str, object]) -> dict[str, str]:
    """Return features that need an accelerator, by pointer. Lion has a kernel for the CPU, but only if offloaded."""
    offloaded = lookup(config, "/zero_optimization/offload_optimizer/device") == "cpu"
    found = {}
    for pointer, names in _ACCELERATED.items():
        value = lookup(config, pointer)
        if str(value).lower() in names and not (offloaded and str(value).lower() == "lion"):
            shown = f"{name_of(pointer)} {value}" if isinstance(value, str) else name_of(pointer)
            found[pointer] = f"{shown}: DeepSpeed supports it on accelerators only, not on a CPU"
    return found


def without_idle(config: Mapping[str, object]) -> JsonObject:
    """Return a copy without those keys that would break a run."""
    kept = copy.deepcopy(dict(config))
    for pointer in _DROPPED:
        parent, name = pointer.rsplit("/", 1)
        section = lookup(kept, parent) if parent else kept
        if isinstance(section, dict):
            section.pop(name, None)
    if "optimizer" not in kept:
        kept["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW serves offloaded parameters too
    return kept
