"""Check paths given by the user; no other module does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

IMPOSSIBLE = {errno.ENAMETOOLONG: "it is too long", errno.ELOOP: "it is a loop of links"}


def usable_path(text: str) -> Path:
    """Return `text` as a path, which need not exist. Raises ValueError, with the reason, if no file can have it.

    Paths must be UTF-8: libraries that receive them, such as tokenizers, accept no others.
    """
    if "\0" in text:
        raise ValueError("it contains a NUL character")
    if "\n" in text or "\r" in text:
        raise ValueError("it contains a line break")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8") from None
    # The system decides what is too long: the limits of names and paths differ.
    try:
        os.stat(text)  # noqa: PTH116  # a Path would be the same
    except OSError as error:
        if error.errno in IMPOSSIBLE:
            raise ValueError(IMPOSSIBLE[error.errno]) from None
    return Path(text)
