"""A finding about a config: position, severity, what is wrong, what to do, and what DeepSpeed does with it.

A finding is a plain value; `cli.render` prints it as text, JSON or annotations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import UserError


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"  # DeepSpeed, or the program named as target, refuses the config
    WARNING = "warning"  # it runs, but not as it is written
    INFO = "info"  # advice with a number behind it

    @property
    def rank(self) -> int:
        """0 for an error, 1 for a warning, 2 for an info: the most severe first."""
        return list(Severity).index(self)


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of a text: `text[start:end]` becomes `new` (offsets in characters of the original text)."""

    start: int
    end: int
    new: str


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One finding. `line` and `column` count from 1; `length` is the number of characters to underline."""

    code: str
    severity: Severity
    message: str
    file: str = ""
    pointer: str = ""
    line: int = 1
    column: int = 1
    length: int = 1
    hint: str = ""
    deepspeed: str = ""
    edits: tuple[Edit, ...] = ()
    is_safe: bool = True  # the edits do not change the training

    def __str__(self) -> str:
        """Return the finding on one line: `file:line:column: code message; hint`."""
        place = f"{self.file}:{self.line}:{self.column}: " if self.file else ""
        return f"{place}{self.code} {self.message}" + (f"; {self.hint}" if self.hint else "")


class ConfigError(UserError):
    """A config that cannot be used; `str()` is one line a finding."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = list(diagnostics)
        super().__init__(*map(str, self.diagnostics))
