"""Look up and set values of a config by JSON pointer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from harness.config.values.json_object import JsonObject

AUTO = "auto"


def lookup(config: Mapping[str, object], pointer: str) -> object:
    """Return the value at a JSON pointer, or None."""
    value: object = config
    for step in _steps(pointer):
        # dict first: isinstance with Mapping takes ten times as long.
        if not isinstance(value, dict | Mapping) or step not in value:
            return None
        value = value[step]
    return value


@lru_cache(4096)
def _steps(pointer: str) -> tuple[str, ...]:
    return tuple(pointer.split("/")[1:])


def put(config: JsonObject, pointer: str, value: object) -> None:
    """Write a value at a JSON pointer, creating objects on the way; do nothing if another value is in the way."""
    *steps, last = pointer.split("/")[1:]
    for step in steps:
        if config.get(step) is None:
            config[step] = {}
        config = config[step]
        if not isinstance(config, dict):
            return
    config[last] = value


def whole(value: object) -> int | None:
    """Return `value` as an int if it is a whole number (5e8 is, true is not), else None."""
    # Not math.isfinite, which fails for integers that are too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
        return None
    return int(value) if value == int(value) else None


def name_of(pointer: str) -> str:
    """Return a pointer as users write it: `zero_optimization.stage` for `/zero_optimization/stage`."""
    # In this order, by RFC 6901: "~01" is "~1".
    steps = (step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])
    return ".".join(step or '""' for step in steps)


def bf16_section(config: Mapping[str, object]) -> str:
    """Return the section that DeepSpeed reads for bf16: the old name, bfloat16, only if bf16 is absent."""
    return "bfloat16" if config.get("bf16") is None and config.get("bfloat16") is not None else "bf16"
