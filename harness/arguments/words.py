"""Read and change the words of a command line as the user typed them, perhaps of another program."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

RESUME = "--resume_from_checkpoint"


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag in `words`; None if it is absent."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def without(words: Sequence[str], flags: set[str]) -> list[str]:
    """Return the words without these flags and their values."""
    kept: list[str] = []
    skips = False
    for word in words:
        name, equals, _ = word.partition("=")
        if not skips and name not in flags:
            kept.append(word)
        skips = name in flags and not equals
    return kept


def with_resume(words: Sequence[str]) -> list[str]:
    """Return a command with `--resume_from_checkpoint auto`, replacing any other value."""
    return [*without(words, {RESUME}), RESUME, "auto"]


def resume_command(words: Sequence[str]) -> str:
    """Return the command that resumes a run from its newest checkpoint, as the user would type it."""
    return shlex.join(with_resume(_as_typed(words)))


def _as_typed(words: Sequence[str]) -> list[str]:
    """Shorten `/bin/python /bin/NAME ...` to `NAME ...` if the shell finds that script by its name."""
    if len(words) > 1 and (name := Path(words[1]).name) and shutil.which(name) == words[1]:
        return [name, *words[2:]]
    return list(words)
