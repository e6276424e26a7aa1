"""Marks in the strings of a conversation: they show where a chat template has written each string.

A mark is one character of Unicode's last private plane that the conversation does not contain. A template that is given
marked strings writes the marks with them. Where its output without the marks is what it writes for the plain
strings, each mark stands where that part of the string stands: nothing has to be looked for by its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.config.values.json_object import JsonObject
from harness.data.files.rows import ASSISTANT

CALLS = "tool_calls"
_PRIVATE, _TANGUT = range(0x100000, 0x10FFFE), range(0x17000, 0x187F8)
"""The marks; those of tool calls are of Tangut, a script of the 11th century.

A template may write a list of arguments as Python does, which escapes what is not printable, as private characters
are. A content that it writes so, as it does not expect a list of parts, is refused for that very reason.
"""
_MARKS = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}{chr(_TANGUT[0])}-{chr(_TANGUT[-1])}]")
_PAIR = re.compile(r"(?<=[^\W_])(?=[^\W_])")
_MOST_PARTS = 64
_NAMES = frozenset({"role", "id", "type", "tool_call_id", "index", "name"})
"""What of a message is no text of it. A template may look at these, as at the length of an id."""


@dataclass(frozen=True)
class Mark:
    """A place in a string of a message.

    Attributes:
        message: its index.
        field: the name in the message under which the string stands.
        item: where a list stands under that name, the index in it; else 0.
        text: the string.
        offset: the characters of it before the mark.
        begins: whether the mark stands before what it marks.
        part: where the part of the string that it marks begins and ends.
    """

    message: int
    field: str
    item: int
    text: str
    offset: int
    begins: bool
    part: tuple[int, int]


@dataclass(frozen=True)
class Placed:
    """A mark in an output of a template.

    Attributes:
        character: the mark itself, which no other has.
        at: the characters of the output before it, marks not counted.
    """

    character: str
    mark: Mark
    at: int

    def start(self, output: str) -> int:
        """Return where the marked part begins in the output: as far to the left as both are the same."""
        mark, back = self.mark, 0
        while back < min(mark.offset - mark.part[0], self.at):
            if output[self.at - back - 1] != mark.text[mark.offset - back - 1]:
                break
            back += 1
        return self.at - back

    def end(self, output: str) -> int:
        """Return where the marked part ends in the output."""
        mark, ahead = self.mark, 0
        while ahead < min(mark.part[1] - mark.offset, len(output) - self.at):
            if output[self.at + ahead] != mark.text[mark.offset + ahead]:
                break
            ahead += 1
        return self.at + ahead


@dataclass(frozen=True)
class MarkedMessages:
    """Messages with marks in their strings, and what each mark stands for."""

    messages: list[JsonObject]
    marks: Mapping[str, Mark]

    def has(self, index: int, field: str | None = None) -> bool:
        """Whether a message has marks, in this field of it where one is given."""
        return any(mark.message == index and field in (None, mark.field) for mark in self.marks.values())

    def read(self, output: str) -> tuple[str, list[Placed]]:
        """Return a template's output without marks, and where they stood, from left to right."""
        parts, placed, length, start = [], [], 0, 0
        for found in _MARKS.finditer(output):
            parts.append(output[start : found.start()])
            length, start = length + found.start() - start, found.end()
            placed.append(Placed(found[0], self.marks[found[0]], length))
        return "".join([*parts, output[start:]]), placed


def holds_marks(text: str) -> bool:
    """Whether the text has characters that serve as marks."""
    return _MARKS.search(text) is not None


def words_of(template: str) -> list[str]:
    """Return the strings in a template's source at which it may split a message, the longest first."""
    from jinja2 import Environment
    from jinja2.exceptions import TemplateError

    try:
        tokens = [value for _, kind, value in Environment().lex(template) if kind == "string"]
    except TemplateError:  # it is rejected when it is used
        return []
    literals = {token[1:-1].replace("\\n", "\n").strip() for token in tokens}
    return sorted(
        (word for word in literals if len(word) > 1 and not word.isalnum()), key=lambda word: (-len(word), word)
    )


def mark(messages: Sequence[JsonObject], words: Sequence[str], *, answers_alone: bool, inside: bool) -> MarkedMessages:
    """Return the messages with marks around each part of their text that `words` divide it into.

    Args:
        answers_alone: leave the messages of other roles as they are.
        inside: put marks between letters within a part, for templates that look at how a string begins or ends.
    """
    marks: dict[str, Mark] = {}
    free = map(chr, _PRIVATE), map(chr, _TANGUT)

    def put(index: int, field: str, item: int, text: str) -> str:
        written, start = [], 0
        for offset, begins, part in _places(text, words, inside):
            character = next(free[field == CALLS], None)
            if character is None:
                break
            marks[character] = Mark(index, field, item, text, offset, begins, part)
            written += [text[start:offset], character]
            start = offset
        return "".join([*written, text[start:]])

    marked: list[JsonObject] = []
    for index, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            names = [name for name in message if name not in _NAMES]
        else:
            names = [] if answers_alone or "content" not in message else ["content"]
        marked.append({**message, **{name: _marked(message[name], partial(put, index, name)) for name in names}})
    return MarkedMessages(marked, marks)


def _marked(value: Any, put: Callable[[int, str], str]) -> Any:
    """Return a field of a message with marks; those in a list are told apart by its items."""
    if isinstance(value, list):
        return [_mapped(each, partial(put, item)) for item, each in enumerate(value)]
    return _mapped(value, partial(put, 0))


def _mapped(value: Any, put: Callable[[str], str]) -> Any:
    """Return a value of JSON with each of its strings replaced, but for those that are no text of the message."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, list):
        return [_mapped(item, put) for item in value]
    if isinstance(value, dict):
        kept = _NAMES - {"name"}
        return {name: item if name in kept else _mapped(item, put) for name, item in value.items()}
    return value


def _places(text: str, words: Sequence[str], inside: bool) -> Iterator[tuple[int, bool, tuple[int, int]]]:
    """Give the places of marks in a string: around the text between `words`, without the space around it."""
    present = [re.escape(word) for word in words if word in text]
    cuts = [match.span() for match in re.finditer("|".join(present), text)][:_MOST_PARTS] if present else []
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    parts = [_stripped(text, *part) for part in zip(starts, ends, strict=True)]
    for start, end in [part for part in parts if part[0] < part[1]] or [_stripped(text, 0, len(text))]:
        if inside:
            pairs = [start + match.start() for match in _PAIR.finditer(text[start:end])]
            yield from [(pairs[0], True, (start, end)), (pairs[-1], False, (start, end))] if pairs else []
        elif start < end:
            yield start, True, (start, end)
            yield end, False, (start, end)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a part of a text without the space around it; of space alone an empty part."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip())
