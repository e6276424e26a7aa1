"""Guess which name a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

ALIKE = 0.8  # share of matching characters; at 0.8 "lr_scheduler" still matches "scheduler"


def plain(name: str) -> str:
    """Return a name without differences of spelling: case, dashes, -ise for -ize."""
    return name.lower().replace("-", "_").replace(" ", "_").replace("isation", "ization").replace("ise", "ize")


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `name` is most likely a misspelling of, or None."""
    by_plain = {plain(candidate): candidate for candidate in candidates}
    found = get_close_matches(plain(name), by_plain, n=1, cutoff=ALIKE)
    return by_plain[found[0]] if found else None
