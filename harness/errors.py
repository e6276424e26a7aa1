"""The error that a user can cause: one line of text. Every entry point prints it and ends with exit code 1."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

MOST_SHOWN = 2000  # characters of a line; a path has up to 4,096


class UserError(Exception):
    """Something the user can fix. Each text is one line: what is wrong, where, what to do.

    Names that come from files and arguments may hold anything, so control characters are escaped, line breaks too, and
    the middle of a very long line is left out.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(one_line, lines)))


class NotMet(UserError):
    """The ranks have come together and cannot go on: each of them raises this."""


class UserErrors(UserError):
    """Several things the user can fix, each a line of the text."""


def refuse_all(problems: Sequence[str]) -> None:
    """Raise UserError for one problem, UserErrors for several; do nothing for none."""
    if problems:
        raise (UserErrors if len(problems) > 1 else UserError)(*problems)


def reason(error: OSError, folder: Path | None = None) -> str:
    """Return why something could not be written, to a folder or where the error says."""
    where = folder or (Path(os.fsdecode(error.filename)).parent if error.filename else None)
    if error.errno == errno.ENOSPC and where is not None and lacks_inodes(where):
        return "no inodes are free, so no file can be created"
    return error.strerror or str(error)


def lacks_inodes(folder: Path) -> bool:
    """Return whether no file can be created where a folder is or would be, however many bytes are free."""
    found = os.statvfs(next(path for path in (folder, *folder.absolute().parents) if path.is_dir()))
    return found.f_files > 0 and found.f_ffree == 0  # some file systems count none at all


def one_line(text: str) -> str:
    """Return `text` as one line that a person can read."""
    line = printable(text)
    if len(line) <= MOST_SHOWN:
        return line
    return f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 4 :]}"


def printable(text: str) -> str:
    """Return `text` with every character that is not printable in its escaped form."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
