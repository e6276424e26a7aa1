"""How DeepSpeed reads the value of a key: whether it accepts, converts or refuses it.

Its pydantic sections are lenient: 5e8, true and "500" all pass as an integer, "yes" and 1 as a boolean. Plain sections
check nothing, and use only some of their values at once. Rules about wrong values use this module, so that they refuse
nothing that DeepSpeed accepts.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass

from harness.checking.schema import Key
from harness.config.values.coercion import as_bool, as_int
from harness.config.values.layout_keys import is_regex
from harness.wording import one_of

NAMES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
FOREIGN: dict[str, tuple[type, ...]] = {"boolean": (str,), "integer": (str, bool), "number": (str, bool)}
"""Types of values that are converted to a key's type."""


@dataclass(frozen=True)
class Reading:
    """The value as DeepSpeed has it, and its fault.

    `fault` is "" (none), "converted" (from a string, or from a switch to a number), "type", "choice" or "range".
    """

    value: object
    fault: str = ""
    wanted: str = ""


def read(key: Key, value: object, *, pydantic: bool) -> Reading:
    """Return how DeepSpeed reads `value` for `key`."""
    types = key.types
    if not types or (value is None and "null" in types):
        return Reading(value)
    for kind in types:
        is_exact = bool(key.spec.get("x-exact"))
        converted = _convert(kind, value, lenient=pydantic and not is_exact)
        if converted is None or (is_exact and kind == "boolean" and not isinstance(value, bool)):
            continue
        fault, wanted = _limits(key, converted)
        if not fault and isinstance(value, FOREIGN.get(kind, ())):
            fault = "converted"
            wanted = NAMES[kind]
        return Reading(converted, fault, wanted)
    wanted = " or ".join(NAMES[kind] for kind in types if kind != "null")
    return Reading(value, "choice" if "enum" in key.core and isinstance(value, str) else "type", wanted)


def as_float(value: object) -> float | None:
    """Return a value as pydantic's float, or None if it refuses it."""
    if isinstance(value, str):
        if not value.strip().isascii():
            return None  # unlike pydantic, Python's int also reads digits of other scripts
        # pydantic ignores single underscores between characters, but then allows no blanks around them.
        if "_" in value:
            if value != value.strip().strip("_") or "__" in value:
                return None
            value = value.replace("_", "")
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def _convert(kind: str, value: object, *, lenient: bool) -> object:
    """Return `value` as a JSON type, or None if it cannot be converted."""
    if kind == "boolean":
        return as_bool(value) if lenient or not isinstance(value, str) else None
    if kind == "integer":
        return as_int(value) if lenient or not isinstance(value, str) else None
    if kind == "number":
        return as_float(value) if lenient or not isinstance(value, str) else None
    accepted = {"string": str, "array": list, "object": dict}.get(kind)
    return value if accepted is not None and isinstance(value, accepted) else None


def _limits(key: Key, value: object) -> tuple[str, str]:
    """Return the fault of a value of the right type: "choice", "range" or ""."""
    core = key.core
    if "enum" in core:
        choices = core["enum"]
        word = value.lower() if key.spec.get("x-case") == "any" and isinstance(value, str) else value
        if word not in choices:
            return "choice", one_of(choices)
    for bound, words, fits in (
        ("minimum", "at least", operator.ge),
        ("exclusiveMinimum", "more than", operator.gt),
        ("maximum", "at most", operator.le),
        ("exclusiveMaximum", "less than", operator.lt),
    ):
        if bound in core and isinstance(value, (int, float)) and not fits(value, core[bound]):
            return "range", f"{words} {core[bound]}"
    if isinstance(value, str) and len(value) < core.get("minLength", 0):
        return "range", "not empty"
    if isinstance(value, str) and not re.search(core.get("pattern", ""), value):
        return "choice", str(core["x-pattern"])
    if isinstance(value, str) and core.get("format") == "regex" and not is_regex(value):
        return "choice", "a regular expression"
    if "items" in core and isinstance(value, list):
        kind = core["items"]["type"]
        if any(_convert(kind, item, lenient=False) is None for item in value):
            return "type", f"a list in which each item is {NAMES[kind]}"
    if "x-items" in key.spec and isinstance(value, list) and any(item not in key.spec["x-items"] for item in value):
        return "choice", "a list of " + one_of(key.spec["x-items"])
    return "", ""
