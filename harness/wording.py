"""Word counts and choices for messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless the number is 1: "1 stage", "2 stages", "1,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def one_of(choices: Sequence[object]) -> str:
    """Return the choices as `a, b or c`."""
    return _listed(choices, "or")


def all_of(items: Sequence[object]) -> str:
    """Return the items as `a, b and c`."""
    return _listed(items, "and")


def _listed(items: Sequence[object], conjunction: str) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} {conjunction} {last}" if first else last
