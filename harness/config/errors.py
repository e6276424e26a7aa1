"""The errors that a user can cause.

`UserError` is one line of text; every entry point prints it and ends with exit code 1. `ConfigError` is the
same for a config: it carries the findings, so that a caller can show the place of each.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.config.diagnostic import Diagnostic


class UserError(Exception):
    """Something the user can fix. The text is one line: what is wrong, where, what to do.

    Names that come from files may hold anything; what a terminal would act on is shown by its escape.
    """

    def __init__(self, text: str) -> None:
        super().__init__("\n".join(map(printable, text.split("\n"))))


class ConfigError(UserError):
    """A config that cannot be used; `str()` is one line a finding."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = list(diagnostics)
        super().__init__("\n".join(str(diagnostic) for diagnostic in self.diagnostics))


def printable(text: str) -> str:
    """Return `text` with every character that is not printable in its escaped form."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
