"""How counts and choices are worded in messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural where it is not one: "1 stage", "2 stages", "1,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def one_of(choices: Sequence[object]) -> str:
    """Return the choices as `a, b or c`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
