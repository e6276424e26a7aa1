"""Read and change the words of a command line, as the user typed them. Words may also be those of another program."""

from __future__ import annotations

from collections.abc import Sequence

RESUME = "--resume_from_checkpoint"


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag among words; None without one."""
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
    """Return a command with `--resume_from_checkpoint auto` instead of whatever it says about it."""
    return [*without(words, {RESUME}), RESUME, "auto"]
