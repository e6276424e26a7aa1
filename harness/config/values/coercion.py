"""Convert values like DeepSpeed's pydantic sections: "500" and 5e8 are integers, "yes" and 1 are booleans.

Source: pydantic's conversion table, lax mode.
"""

from __future__ import annotations

import re

LARGEST_WHOLE_FLOAT = 2.0**63  # above this pydantic refuses a float as an int
_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}


def as_bool(value: object) -> bool | None:
    """Return a value as pydantic's bool, or None if it refuses it."""
    if isinstance(value, str):
        word = value.lower()
        return word in _TRUE if word in _TRUE | _FALSE else None
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def as_int(value: object) -> int | None:
    """Return a value as pydantic's int, or None if it refuses it."""
    if isinstance(value, str):
        whole_number = len(value) < 400 and re.fullmatch(r"\s*([-+]?[0-9]+(_[0-9]+)*)(\.0+)?\s*", value)
        return int(whole_number.group(1)) if whole_number else None
    if isinstance(value, float):
        return int(value) if abs(value) < LARGEST_WHOLE_FLOAT and value == int(value) else None
    return int(value) if isinstance(value, int) else None
