"""Formats of data files: one module each, with everything specific in its `FORMAT`. Imports no torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from harness.data.formats.format import Extent, Format, RowFormat
from harness.data.formats.token_format import TokenFile, TokenFormat

__all__ = [
    "FORMATS",
    "PLAIN_TEXT",
    "TOKEN_FORMATS",
    "Extent",
    "Format",
    "RowFormat",
    "TokenFile",
    "TokenFormat",
    "format_of",
]


def _found() -> Iterator[Format | TokenFormat]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        found = getattr(import_module(module.name), "FORMAT", None)
        if isinstance(found, Format | TokenFormat):
            yield found


_ALL = sorted(_found(), key=lambda each: (each.suffix != ".txt", each.suffix))
FORMATS: Mapping[str, Format] = {each.suffix: each for each in _ALL if isinstance(each, Format)}
"""Formats of text and rows by suffix, in the order in which messages name them: plain text first, then by suffix."""
TOKEN_FORMATS: Mapping[str, TokenFormat] = {each.suffix: each for each in _ALL if isinstance(each, TokenFormat)}
"""Formats of token ids by the suffix of the file that holds the ids."""
PLAIN_TEXT = FORMATS[".txt"]
"""The format of a file with an unknown suffix, such as a .py file of Python's standard library."""


def format_of(file: Path) -> Format:
    """Return the format of a file of text or rows by its suffix."""
    return FORMATS.get(file.suffix, PLAIN_TEXT)
