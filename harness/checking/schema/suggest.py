"""Guess what an unknown key was meant to be: another program's name, or a key of another section."""

from __future__ import annotations

from harness.checking import schema
from harness.spelling import plain

# names that many sections have do not tell where a key belongs
_EVERYWHERE = frozenset({"enabled", "type", "params", "device", "dtype", "seed", "metric", "debug", "verbose", "mode"})


def elsewhere(name: str, section: str, value: object) -> str | None:
    """Return the pointer of the key in another section that `name` in `section` was meant to be, or None.

    An object is never meant as a number or a switch.
    """
    meant = schema.aliases().get(plain(name))
    if meant is not None and meant.rsplit("/", 1)[0] != section and _takes(meant, value):
        return meant
    pointers = [p for p in schema.places().get(plain(name), ()) if p.rsplit("/", 1)[0] != section and _takes(p, value)]
    if plain(name) in _EVERYWHERE or not pointers or len(pointers) > 2:
        return None
    return min(pointers, key=len)


def _takes(pointer: str, value: object) -> bool:
    key = schema.find(pointer)
    return not isinstance(value, dict) or (key is not None and (key.is_section or "object" in key.types))


def alias_here(name: str, section: str) -> str | None:
    """Return the key of the same section that another program calls `name`, or None."""
    meant = schema.aliases().get(plain(name))
    if meant is not None and meant.rsplit("/", 1)[0] == section:
        return meant.rsplit("/", 1)[1]
    return None
