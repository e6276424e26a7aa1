"""Errors that a user can cause, one line each. Every entry point prints them and exits with code 1."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

MOST_SHOWN = 2000  # characters of a line; a path has up to 4,096


class UserError(Exception):
    """An error that the user can fix. Each message is one line: what is wrong, where, what to do.

    Names from files and arguments may contain anything, so control characters and line breaks are escaped, and the
    middle of a very long line is left out.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(one_line, lines)))


class NotMet(UserError):
    """The ranks have met but cannot continue: every rank raises this."""


class UserErrors(UserError):
    """Several errors that the user can fix, one line each."""


def refuse_all(problems: Sequence[str]) -> None:
    """Raise UserError for one problem, UserErrors for several; do nothing for none."""
    if problems:
        raise (UserErrors if len(problems) > 1 else UserError)(*problems)


def reason(error: OSError, folder: Path | None = None) -> str:
    """Return why a write failed, to `folder` or to the path in the error."""
    where = folder or (Path(os.fsdecode(error.filename)).parent if error.filename else None)
    if error.errno == errno.ENOSPC and where is not None and lacks_inodes(where):
        return "no inodes are free, so no file can be created"
    return error.strerror or str(error)


def lacks_inodes(folder: Path) -> bool:
    """Return whether no file can be created in a folder, which need not exist, for lack of inodes."""
    found = os.statvfs(next(path for path in (folder, *folder.absolute().parents) if path.is_dir()))
    # Some file systems do not count inodes, and report 0 of 0.
    return found.f_files > 0 and found.f_ffree == 0


def headline(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def text_of(error: BaseException, most: int = MOST_SHOWN) -> str:
    """Return an error's text as one line of at most `most` characters; the name of its type if it has none."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


def one_line(text: str) -> str:
    """Return `text` as one readable line."""
    line = printable(text)
    if len(line) <= MOST_SHOWN:
        return line
    return f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 4 :]}"


def printable(text: str) -> str:
    """Return `text` with unprintable characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
