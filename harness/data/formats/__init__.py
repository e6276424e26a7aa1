"""Formats of data files: one module each, with everything specific in its class. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

from harness.data.formats.format import Extent, Format, RowFormat
from harness.data.formats.token_format import TokenFile, TokenFormat
from harness.records import records

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

# mypy takes `type[T]` for a class that is called, and refuses an abstract one.
_FOUND = records(__name__, __path__, Format, attrgetter("suffix"))  # type: ignore[type-abstract]
_TOKENS = records(__name__, __path__, TokenFormat, attrgetter("suffix"))  # type: ignore[type-abstract]
FORMATS: Mapping[str, Format] = {name: _FOUND[name] for name in sorted(_FOUND, key=lambda name: (name != ".txt", name))}
"""Formats of text and rows by suffix, in the order in which messages name them: plain text first, then by suffix."""
TOKEN_FORMATS: Mapping[str, TokenFormat] = dict(sorted(_TOKENS.items()))
"""Formats of token ids by the suffix of the file that holds the ids."""
PLAIN_TEXT = FORMATS[".txt"]
"""The format of a file with an unknown suffix, such as a .py file of Python's standard library."""


def format_of(file: Path) -> Format:
    """Return the format of a file of text or rows by its suffix."""
    return FORMATS.get(file.suffix, PLAIN_TEXT)
