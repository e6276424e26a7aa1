"""Read and change the words of a command line as the user typed them, perhaps of another program."""

from __future__ import annotations

from collections.abc import Sequence

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
