"""How counts are worded in messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural where it is not one: "1 stage", "2 stages", "1,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
