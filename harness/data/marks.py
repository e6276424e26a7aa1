"""Insert marks into the strings of a conversation, to see where a chat template writes each string.

A mark is one character that the conversation does not contain, usually of Unicode's last private plane. A template
copies marks together with strings. If the output without its marks equals the output for the unmarked conversation,
each mark shows the position of its part of the string, and no text has to be searched for.
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
"""The characters that serve as marks; those in tool calls are from Tangut, a script of the 11th century.

A template may write a tool call's arguments with Python's `str`, which escapes unprintable characters, such as private
ones, but not Tangut. If a template writes a list of content parts with `str`, that is a mistake: its private marks are
escaped and not found, so the conversation is refused.
"""
_MARKS = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}{chr(_TANGUT[0])}-{chr(_TANGUT[-1])}]")
_PAIR = re.compile(r"(?<=[^\W_])(?=[^\W_])")  # a position between two letters or digits
_MOST_PARTS = 64
_NAMES = frozenset({"role", "id", "type", "tool_call_id", "index", "name"})
"""Keys whose values get no marks: a template may compare these values, or test the length of an id."""


@dataclass(frozen=True)
class Mark:
    """A mark in a string of a message, at the beginning or the end of a part of the string.

    Attributes:
        message: index of the message.
        field: key of the message that holds the string.
        item: if the key holds a list, the index in it; else 0.
        text: the string.
        offset: number of characters of `text` before the mark.
        begins: whether it marks the beginning of its part, not the end.
        part: first character and last + 1 of the part in `text`.
    """

    message: int
    field: str
    item: int
    text: str
    offset: int
    begins: bool
    part: tuple[int, int]


@dataclass(frozen=True)
class FoundMark:
    """A mark in the output of a template.

    Attributes:
        character: the character of the mark, unique to it.
        at: number of characters of the output before it, without marks.
    """

    character: str
    mark: Mark
    at: int

    def start(self, output: str) -> int:
        """Return where the marked part begins in the output: extend to the left while text and output agree."""
        mark, back = self.mark, 0
        while back < min(mark.offset - mark.part[0], self.at):
            if output[self.at - back - 1] != mark.text[mark.offset - back - 1]:
                break
            back += 1
        return self.at - back

    def end(self, output: str) -> int:
        """Return where the marked part ends in the output: extend to the right while text and output agree."""
        mark, ahead = self.mark, 0
        while ahead < min(mark.part[1] - mark.offset, len(output) - self.at):
            if output[self.at + ahead] != mark.text[mark.offset + ahead]:
                break
            ahead += 1
        return self.at + ahead


@dataclass(frozen=True)
class MarkedMessages:
    """Messages with marks in their strings; `marks` describes the mark of each character."""

    messages: list[JsonObject]
    marks: Mapping[str, Mark]

    def has(self, index: int, field: str | None = None) -> bool:
        """Return whether a message has marks, or whether its `field` has."""
        return any(mark.message == index and field in (None, mark.field) for mark in self.marks.values())

    def read(self, output: str) -> tuple[str, list[FoundMark]]:
        """Return a template's output without marks, and the marks from left to right."""
        parts, placed, length, start = [], [], 0, 0
        for found in _MARKS.finditer(output):
            parts.append(output[start : found.start()])
            length, start = length + found.start() - start, found.end()
            placed.append(FoundMark(found[0], self.marks[found[0]], length))
        return "".join([*parts, output[start:]]), placed


def holds_marks(text: str) -> bool:
    """Return whether the text contains characters that serve as marks."""
    return _MARKS.search(text) is not None


def words_of(template: str) -> list[str]:
    """Return the string literals in a template's source at which it may split a message, longest first.

    Each contains a character that is no letter or digit, as `</think>` does.
    """
    from jinja2 import Environment
    from jinja2.exceptions import TemplateError

    try:
        tokens = [value for _, kind, value in Environment().lex(template) if kind == "string"]
    except TemplateError:  # the template is rejected when it is used
        return []
    literals = {token[1:-1].replace("\\n", "\n").strip() for token in tokens}
    return sorted(
        (word for word in literals if len(word) > 1 and not word.isalnum()), key=lambda word: (-len(word), word)
    )


def mark(messages: Sequence[JsonObject], words: Sequence[str], *, answers_alone: bool, inside: bool) -> MarkedMessages:
    """Return the messages with marks around each part of their text; `words` divide a text into parts.

    Args:
        answers_alone: mark only the assistant's messages.
        inside: put the marks between letters inside a part, for templates that test how a string begins or ends.
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
    """Return the value of a message's key with marks; in a list, `put` gets the index of the item."""
    if isinstance(value, list):
        return [_mapped(each, partial(put, item)) for item, each in enumerate(value)]
    return _mapped(value, partial(put, 0))


def _mapped(value: Any, put: Callable[[str], str]) -> Any:
    """Return a JSON value with each string replaced by `put`, except under the keys _NAMES."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, list):
        return [_mapped(item, put) for item in value]
    if isinstance(value, dict):
        kept = _NAMES - {"name"}
        return {name: item if name in kept else _mapped(item, put) for name, item in value.items()}
    return value


def _places(text: str, words: Sequence[str], inside: bool) -> Iterator[tuple[int, bool, tuple[int, int]]]:
    """Yield (offset, begins, part) of each mark: two for each part between `words`, without surrounding space."""
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
    """Return the span of text[start:end] without surrounding space; an empty span if there is only space."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip())
