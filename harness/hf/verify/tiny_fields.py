"""The fields of a config, as its config.json has them, and the table of field names that `tiny_sizes.json` holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeGuard

from harness.config.values.json_object import JsonObject

Fields = JsonObject


def read_table() -> Fields:
    """Return what `tiny_sizes.json` says."""
    table: Fields = json.loads((Path(__file__).parent / "tiny_sizes.json").read_text(encoding="utf-8"))
    return table


def varied(fields: Fields, variant: JsonObject) -> Fields:
    """Return the fields changed as one of the table's `variants` says.

    Some are set, some filled in where they are None, some left out, some added inside of a config that is a field.
    """
    changes = {key: value for key, value in variant.get("set", {}).items() if key in fields}
    kept = {
        key: value
        for key, value in fields.items()
        if not any(fnmatchcase(key, pattern) for pattern in variant.get("left_out", ()))
    }
    missing = {key: value for key, value in variant.get("fill", {}).items() if kept.get(key, 0) is None}
    inside = {key: {**kept[key], **more} for key, more in variant.get("inside", {}).items() if kept.get(key)}
    return {**copy.deepcopy(kept), **changes, **missing, **inside}


def parts_of(fields: Fields) -> Iterator[Fields]:
    """Yield the config and all configs inside of it."""
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")) and key != "per_layer_config":
            yield from parts_of(value)


def overrides_in(part: Fields) -> list[Fields]:
    """Return, for each layer that differs from the config, the fields that are different."""
    return list((part.get("per_layer_config") or {}).values())


def is_size(value: object) -> TypeGuard[int]:
    """Return whether a field's value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
