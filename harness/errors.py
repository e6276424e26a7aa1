"""The error that a user can cause: one line of text. Every entry point prints it and ends with exit code 1."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something the user can fix. The text is one line: what is wrong, where, what to do.

    Names that come from files may hold anything; what a terminal would act on is shown by its escape.
    """

    def __init__(self, text: str) -> None:
        super().__init__("\n".join(map(printable, text.split("\n"))))


class UserErrors(UserError):
    """Several things the user can fix, each a line of the text."""


def refuse_all(problems: Sequence[str]) -> None:
    """Raise UserErrors for what is wrong, UserError for one thing alone; nothing for none."""
    if problems:
        raise (UserErrors if len(problems) > 1 else UserError)("\n".join(problems))


def printable(text: str) -> str:
    """Return `text` with every character that is not printable in its escaped form."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
