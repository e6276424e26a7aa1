"""Convert a config to the values that DeepSpeed reads from it, in its checked sections, and old forms to new ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from harness.checking import schema
from harness.checking.schema import Key
from harness.checking.schema.coercion import read
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import LEAST
from harness.config.values.pointers import AUTO


def as_read(config: Mapping[str, object]) -> JsonObject:
    """Return a copy with every value as DeepSpeed converts it: `"true"` and 1 become true, `"2"` becomes 2.

    Values that DeepSpeed refuses, keys that it does not know, and "auto" stay unchanged.
    """
    copied = _section(config, schema.root(), "")
    zero = copied.get("zero_optimization")
    if isinstance(zero, bool):
        copied["zero_optimization"] = {"stage": int(zero)}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero, dict) and zero.get(old) is True and new not in zero:
            zero[new] = {"device": "cpu"}
            del zero[old]
    return copied


def _section(values: Mapping[str, object], section: Key, pointer: str) -> JsonObject:
    keys = section.keys
    return {name: _value(value, keys.get(name), section, f"{pointer}/{name}") for name, value in values.items()}


def _value(value: object, key: Key | None, section: Key, pointer: str) -> object:
    if isinstance(value, dict):
        inner = key if key is not None and key.is_section else Key("", {})
        return _section(value, inner, pointer)
    if isinstance(value, list):
        return copy.deepcopy(value)
    if key is None or key.is_section or value == AUTO or (pointer in LEAST and not section.is_pydantic):
        return value
    reading = read(key, value, pydantic=section.is_pydantic)
    is_exact = section.is_pydantic and key.types[:1] in (("boolean",), ("integer",))
    return reading.value if reading.fault == "converted" or (is_exact and not reading.fault) else value
