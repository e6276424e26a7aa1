"""Convert a flag's value from the command line, a config file or Python to the type of its field."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from numbers import Integral, Real
from types import UnionType
from typing import Union, get_args, get_origin

from harness.config.values.json_file import parse_json

MOST = 2**63 - 1
"""Largest whole number, as in torch; with one bit more, a seed plus a rank would not fit."""
TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")


def takes(hint: object, kind: type) -> bool:
    """Return whether a type hint accepts a class: `float | None` accepts float, `list[str]` accepts list."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any((get_origin(member) or member) is kind for member in members)


def typed(hint: object, value: object) -> object:
    """Return a value converted to the type `hint`. Raises ValueError, with a message, if that is impossible."""
    if isinstance(value, Enum):
        value = value.value
    # A flag that takes words besides true and false: such a word must not become a boolean.
    is_word = takes(hint, bool) and takes(hint, str) and str(value).lower() not in TRUE + FALSE
    for kind, convert in _CONVERSIONS:
        if takes(hint, kind) and not is_word:
            return convert(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if not isinstance(value, str | os.PathLike):
        raise ValueError("not a text")
    return os.fspath(value)


def _words(value: object) -> list[object]:
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    if not isinstance(value, list | tuple | set):
        raise ValueError("not a list")
    # A set is sorted, to be in the same order on every rank.
    words = sorted(value, key=str) if isinstance(value, set) else value
    return [os.fspath(word) if isinstance(word, os.PathLike) else word for word in words]


def _mapping(value: object) -> object:
    """Return a mapping as it is, a text with a JSON object as a dict, and any other text as a path."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ValueError("neither a path nor a dictionary")
    text = os.fspath(value)
    if not text.lstrip().startswith("{"):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _boolean(value: object) -> bool:
    text = str(value).lower()
    if text in TRUE + FALSE:
        return text in TRUE
    raise ValueError("not true or false")


def _number(value: object) -> float:
    if not isinstance(value, str | Real) or isinstance(value, bool):
        raise ValueError("not a number")
    try:
        return value if isinstance(value, int) else float(value)
    except ValueError:
        raise ValueError("not a number") from None


def _whole(value: object) -> int:
    found: int | None = None
    if isinstance(value, str | Integral) and not isinstance(value, bool):
        # Not by a float, which rounds what has more than 53 bits.
        with suppress(ValueError):
            found = int(value)
    if found is None:
        number = _number(value)
        if number != number or abs(number) == float("inf") or int(number) != number:
            raise ValueError("not a whole number")
        found = int(number)
    if abs(found) > MOST:
        raise ValueError(f"more than {MOST}")
    return found


_CONVERSIONS: tuple[tuple[type, Callable[[object], object]], ...] = (
    (list, _words),
    (Mapping, _mapping),
    (bool, _boolean),
    (float, _number),
    (int, _whole),
)
