"""How DeepSpeed reads one value: whether it accepts, converts or refuses it.

Its pydantic sections are lenient: 5e8, true and "500" all pass as an integer, "yes" and 1 as a boolean. Plain sections
check nothing, and use only some of their values at once. Rules about wrong values use this module, so that they refuse
nothing that DeepSpeed accepts. Source: pydantic's conversion table, lax mode.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass

from harness.config.schema import Key
from harness.wording import one_of

LARGEST_WHOLE_FLOAT = 2.0**63  # above this pydantic refuses a float as an int
_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}
NAMES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


@dataclass(frozen=True)
class Reading:
    """The value as DeepSpeed has it, and its fault.

    `fault` is "" (none), "converted" (from a string, or from a switch to a number), "type", "choice" or "range".
    """

    value: object
    fault: str = ""
    wanted: str = ""


def as_bool(value: object) -> bool | None:
    """Return a value as pydantic's bool, or None if it refuses it."""
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def as_int(value: object) -> int | None:
    """Return a value as pydantic's int, or None if it refuses it."""
    if isinstance(value, str):
        whole_number = len(value) < 400 and re.fullmatch(r"\s*([-+]?[0-9]+(_[0-9]+)*)(\.0+)?\s*", value)
        return int(whole_number.group(1)) if whole_number else None
    if isinstance(value, float):
        return int(value) if abs(value) < LARGEST_WHOLE_FLOAT and value == int(value) else None
    return int(value) if isinstance(value, int) else None


def as_float(value: object) -> float | None:
    """Return a value as pydantic's float, or None if it refuses it."""
    if isinstance(value, str):
        if not value.strip().isascii():
            return None  # unlike pydantic, Python's int also reads digits of other scripts
        if "_" in value:  # pydantic ignores single underscores between characters, and then allows no blanks
            if value != value.strip().strip("_") or "__" in value:
                return None
            value = value.replace("_", "")
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


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
        foreign = (str,) if kind == "boolean" else (str, bool) if kind in ("integer", "number") else ()
        if not fault and isinstance(value, foreign):
            fault, wanted = "converted", NAMES[kind]
        return Reading(converted, fault, wanted)
    wanted = " or ".join(NAMES[kind] for kind in types if kind != "null")
    return Reading(value, "choice" if "enum" in key.core and isinstance(value, str) else "type", wanted)


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


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


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
    if isinstance(value, str) and core.get("format") == "regex" and not _is_regex(value):
        return "choice", "a regular expression"
    if "items" in core and isinstance(value, list):
        kind = core["items"]["type"]
        if any(_convert(kind, item, lenient=False) is None for item in value):
            return "type", f"a list in which each item is {NAMES[kind]}"
    if "x-items" in key.spec and isinstance(value, list) and any(item not in key.spec["x-items"] for item in value):
        return "choice", "a list of " + one_of(key.spec["x-items"])
    return "", ""
