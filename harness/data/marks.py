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
from typing import Any, TypeAlias

from harness.config.values.json_object import JsonObject
from harness.data.rows.kinds import ASSISTANT

CALLS = "tool_calls"
_PRIVATE = range(0x100000, 0x10FFFE)
TANGUT = range(0x17000, 0x187F8)
"""The characters that serve as marks; those in tool calls are from Tangut, a script of the 11th century.

A template may write a tool call's arguments with Python's `str`, which escapes unprintable characters, such as private
ones, but not Tangut. If a template writes a list of content parts with `str`, that is a mistake: its private marks are
escaped and not found, so the conversation is refused.
"""
_MARKS = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}{chr(TANGUT[0])}-{chr(TANGUT[-1])}]")
_PAIR = re.compile(r"(?<=[^\W_])(?=[^\W_])")  # a position between two letters or digits
_MOST_PARTS = 64
Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
LINKS = frozenset({"role", "id", "type", "tool_call_id", "index"})
"""Keys whose values say what a value is, or link two of them: a template may compare them, or test their length."""
_NAMES = LINKS | {"name"}
"""Keys of a message whose values get no marks. The name in a tool call gets them."""


@dataclass(frozen=True)
class Part:
    """A part of a string in a message: all of it, or what stands between words at which the template may split it.

    Attributes:
        message: index of the message.
        path: where the string is in the message; its first key is the message's.
        text: the string.
        span: first character and last + 1 of the part in `text`.
    """

    message: int
    path: Path
    text: str
    span: tuple[int, int]

    @property
    def field(self) -> str:
        """Key of the message that holds the string."""
        return str(self.path[0])

    @property
    def item(self) -> int:
        """If that key holds a list, the index in it; else 0."""
        return self.path[1] if len(self.path) > 1 and isinstance(self.path[1], int) else 0


@dataclass(frozen=True)
class Mark:
    """A mark at the beginning or the end of a part of a string.

    Attributes:
        offset: number of characters of the string before the mark.
        begins: whether it marks the beginning of its part, not the end.
    """

    part: Part
    offset: int
    begins: bool

    @property
    def message(self) -> int:
        """Index of the message."""
        return self.part.message

    @property
    def field(self) -> str:
        """Key of the message that holds the string."""
        return self.part.field


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
        mark = self.mark
        part = self.mark.part
        back = 0
        while back < min(mark.offset - part.span[0], self.at):
            if output[self.at - back - 1] != part.text[mark.offset - back - 1]:
                break
            back += 1
        return self.at - back

    def end(self, output: str) -> int:
        """Return where the marked part ends in the output: extend to the right while text and output agree."""
        mark = self.mark
        part = self.mark.part
        ahead = 0
        while ahead < min(part.span[1] - mark.offset, len(output) - self.at):
            if output[self.at + ahead] != part.text[mark.offset + ahead]:
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
            length += found.start() - start
            start = found.end()
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
    free = map(chr, _PRIVATE), map(chr, TANGUT)

    def put(index: int, path: Path, text: str) -> str:
        written, start = [], 0
        for span in parts(text, words):
            for offset, begins in _places(text, span, inside):
                character = next(free[path[0] == CALLS], None)
                if character is None:
                    break
                marks[character] = Mark(Part(index, path, text, span), offset, begins)
                written += [text[start:offset], character]
                start = offset
        return "".join([*written, text[start:]])

    marked: list[JsonObject] = []
    for index, message in enumerate(messages):
        names = [name for name in message if name not in _NAMES]
        if message["role"] != ASSISTANT and answers_alone:
            names = []
        marked.append({**message, **{name: mapped(message[name], partial(put, index), (name,)) for name in names}})
    return MarkedMessages(marked, marks)


def strings(messages: Sequence[JsonObject]) -> list[tuple[int, Path, str]]:
    """Return (message, path, string) of each string that gets marks."""
    found: list[tuple[int, Path, str]] = []

    def note(index: int, path: Path, text: str) -> str:
        found.append((index, path, text))
        return text

    for index, message in enumerate(messages):
        for name in message:
            if name not in _NAMES:
                mapped(message[name], partial(note, index), (name,))
    return found


def mapped(value: Any, change: Callable[[Path, str], str], path: Path = ()) -> Any:
    """Return a JSON value with each string replaced by `change`, except under the keys LINKS."""
    if isinstance(value, str):
        return change(path, value)
    if isinstance(value, list):
        return [mapped(item, change, (*path, number)) for number, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: item if name in LINKS else mapped(item, change, (*path, name)) for name, item in value.items()}
    return value


def parts(text: str, words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the spans of a text between `words`, without surrounding space; none for a blank text."""
    present = [re.escape(word) for word in words if word in text]
    cuts = [match.span() for match in re.finditer("|".join(present), text)][:_MOST_PARTS] if present else []
    starts = [0, *(end for _, end in cuts)]
    ends = [*(start for start, _ in cuts), len(text)]
    spans = [_stripped(text, *part) for part in zip(starts, ends, strict=True)]
    whole = _stripped(text, 0, len(text))
    return [span for span in spans if span[0] < span[1]] or ([whole] if whole[0] < whole[1] else [])


def _places(text: str, span: tuple[int, int], inside: bool) -> Iterator[tuple[int, bool]]:
    """Yield (offset, begins) of the two marks of a part; none for a part without room inside."""
    start, end = span
    if inside:
        pairs = [start + match.start() for match in _PAIR.finditer(text[start:end])]
        yield from [(pairs[0], True), (pairs[-1], False)] if pairs else []
    else:
        yield start, True
        yield end, False


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of text[start:end] without surrounding space; an empty span if there is only space."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip())
