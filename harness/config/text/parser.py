"""Read a config's text as DeepSpeed does, and remember the position of everything.

DeepSpeed reads its file as Hjson: comments, missing or trailing commas and unquoted words are accepted. An
unquoted word that is not exactly true, false, null or a number runs to the end of its line, comma included:
`True,` is the string "True,". The result is a tree of nodes with offsets into the text, and a list of
oddities, the places where the text is not plain JSON. Grammar: https://hjson.github.io/syntax.html
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_DIGITS = 1000
MAX_DEPTH = 100  # a config is four or five levels deep; beyond this a reader would exhaust the stack

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?[\t ]*")
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_NO_CHARACTER = re.compile(r"0000|[dD][89a-fA-F][0-9a-fA-F]{2}")  # NUL, and half of a surrogate pair
_CHUNK = re.compile(r"[^'\"\\\x00-\x1f]*")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LITERALS = {"true": True, "false": False, "null": None}
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MULTI_QUOTE = "'''"
_TOKEN = re.compile(
    r"'{3}.*?'{3}|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|#[^\n]*|//[^\n]*|/\*.*?\*/|[{}\[\]]|\n[ \t]*",
    re.DOTALL,
)
_CLOSERS = {"{": "}", "[": "]"}


class TextError(ValueError):
    """The text cannot be read at all; `offset` is where reading stopped, `hint` a remedy other than for syntax."""

    def __init__(self, message: str, offset: int, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Member:
    """One `key: value` of an object; offsets include the quotes."""

    key: str
    key_start: int
    key_end: int
    node: Node


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its position. Objects keep every member, also duplicates."""

    start: int
    end: int
    scalar: object = None
    members: tuple[Member, ...] | None = None
    items: tuple[Node, ...] | None = None

    def data(self) -> Any:
        """Return the plain Python value; the last one of duplicate keys counts."""
        if self.members is not None:
            return {member.key: member.node.data() for member in self.members}
        if self.items is not None:
            return [item.data() for item in self.items]
        return self.scalar

    def child(self, key: str) -> Member | Node | None:
        """Return the member (of an object) or the item (of an array) named by one step of a JSON pointer."""
        if self.members is not None:
            return next((member for member in reversed(self.members) if member.key == key), None)
        if self.items is not None and key.isdigit() and int(key) < len(self.items):
            return self.items[int(key)]
        return None


@dataclass(frozen=True, slots=True)
class NonJsonSyntax:
    """A place where the text is not plain JSON, though DeepSpeed reads it."""

    kind: str  # comment, trailing-comma, missing-comma, bare-word, quotes, bare-key, bare-root, duplicate-key
    start: int
    end: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The root node of a text, and its oddities."""

    root: Node
    oddities: tuple[NonJsonSyntax, ...]


@dataclass
class _Reader:
    text: str
    oddities: list[NonJsonSyntax] = field(default_factory=list)
    commented: int = 0  # comments before this offset are already noted

    def note(self, kind: str, start: int, end: int, detail: str = "") -> None:
        self.oddities.append(NonJsonSyntax(kind, start, end, detail))

    def skip(self, at: int) -> int:
        """Return the offset of the next character that is neither white space nor comment."""
        text = self.text
        while at < len(text):
            start = at
            if text[at] in " \t\n\r":
                at += 1
                continue
            if text[at] == "#" or text.startswith("//", at):
                at = _line_end(text, at)
            elif text.startswith("/*", at):
                close = text.find("*/", at + 2)
                if close < 0:
                    raise TextError("a comment is never closed", at)
                at = close + 2
            else:
                break
            if start >= self.commented:
                self.note("comment", start, at)
                self.commented = at
        return at

    def value(self, at: int, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise TextError(f"values are nested more than {MAX_DEPTH} deep", at, "a config has four or five levels")
        head = self.text[at : at + 1]
        if head == "{":
            return self.members(at, at + 1, depth, closing="}")
        if head == "[":
            return self.array(at, depth)
        if self.text.startswith(_MULTI_QUOTE, at):
            return self.multiline(at)
        if head in ('"', "'"):
            string, end = self.string(at)
            return Node(at, end, string)
        if head == "" or head in "{}[],:":
            what = "the end of the file" if head == "" else repr(head)
            raise TextError(f"expected a value here, not {what}", at)
        return self.bare(at)

    def members(self, start: int, at: int, depth: int, closing: str) -> Node:
        """Return the members of an object up to `closing`; an empty `closing` is an object without braces."""
        members: list[Member] = []
        at = self.skip(at)
        while self.text[at : at + 1] != closing:
            member, after = self.member(at, depth)
            members.append(member)
            at = self.separator(after, member.node, closing)
        self.note_duplicates(members)
        return Node(start, at + len(closing), members=tuple(members))

    def member(self, at: int, depth: int) -> tuple[Member, int]:
        key, key_end = self.key(at)
        colon = self.skip(key_end)
        if self.text[colon : colon + 1] != ":":
            raise TextError(f"expected a colon after the key {key!r}", colon)
        node = self.value(self.skip(colon + 1), depth + 1)
        return Member(key, at, key_end, node), self.skip(node.end)

    def separator(self, at: int, value: Node, closing: str) -> int:
        """Skip an optional comma, and note where plain JSON requires one or forbids it."""
        head = self.text[at : at + 1]
        if head == ",":
            after = self.skip(at + 1)
            if self.text[after : after + 1] == closing:
                self.note("trailing-comma", at, at + 1)
            return after
        if head != closing:
            is_word = isinstance(value.scalar, str) and self.text[value.start] not in "\"'"
            self.note("missing-comma", value.end, value.end, "behind a word" if is_word else "")
        return at

    def array(self, start: int, depth: int) -> Node:
        items: list[Node] = []
        at = self.skip(start + 1)
        while self.text[at : at + 1] != "]":
            if at >= len(self.text):
                raise TextError("expected a value or a closing bracket here, not the end of the file", at)
            items.append(self.value(at, depth + 1))
            at = self.separator(self.skip(items[-1].end), items[-1], "]")
        return Node(start, at + 1, items=tuple(items))

    def note_duplicates(self, members: list[Member]) -> None:
        times = Counter(member.key for member in members)
        seen: set[str] = set()
        for member in members:
            if times[member.key] > 1 and member.key in seen:
                self.note("duplicate-key", member.key_start, member.key_end, member.key)
            seen.add(member.key)

    def key(self, at: int) -> tuple[str, int]:
        head = self.text[at : at + 1]
        if head in ('"', "'") and head:
            return self.string(at)
        match = re.compile(r"[^\s:{}\[\],]+").match(self.text, at)
        if match is None:
            what = "the end of the file" if head == "" else repr(head)
            raise TextError(f"expected a key or a closing brace here, not {what}", at)
        self.note("bare-key", at, match.end(), match.group())
        return match.group(), match.end()

    def string(self, start: int) -> tuple[str, int]:
        """Return a quoted string and the offset behind its closing quote."""
        text = self.text
        quote = self.text[start]
        at = start + 1
        parts = []
        if quote == "'":
            self.note("quotes", start, start + 1)
        while True:
            chunk = _CHUNK.match(text, at)
            assert chunk is not None  # the pattern matches the empty string
            parts.append(chunk.group())
            at = chunk.end()
            head = text[at : at + 1]
            if head == "":
                raise TextError("a string is never closed", start)
            if head == quote:
                return "".join(parts), at + 1
            if head in "\"'":
                parts.append(head)
                at += 1
            elif head == "\\":
                char, at = self.escape(at)
                parts.append(char)
            else:
                raise TextError("a string contains a line break or another control character", at)

    def escape(self, at: int) -> tuple[str, int]:
        code = self.text[at + 1 : at + 2]
        if code in _ESCAPES and code:
            return _ESCAPES[code], at + 2
        if code == "u":
            pair = _SURROGATES.match(self.text, at)
            if pair is not None:  # two escapes make one character beyond the first 65,536
                high, low = (
                    int(digits, 16) - base for digits, base in zip(pair.groups(), (0xD800, 0xDC00), strict=True)
                )
                return chr(0x10000 + (high << 10) + low), at + 12
            digits = self.text[at + 2 : at + 6]
            if re.fullmatch(r"[0-9a-fA-F]{4}", digits):
                if _NO_CHARACTER.fullmatch(digits):
                    raise TextError(f"\\u{digits} is not a character that a name or a path can have", at)
                return chr(int(digits, 16)), at + 6
        raise TextError(f"unknown escape \\{code} in a string", at)

    def multiline(self, start: int) -> Node:
        close = self.text.find(_MULTI_QUOTE, start + 3)
        if close < 0:
            raise TextError("a string is never closed", start)
        self.note("quotes", start, start + 3)
        return Node(start, close + 3, self.text[start + 3 : close].strip())

    def bare(self, start: int) -> Node:
        """Return an unquoted word: a literal or a number if one ends here, else all up to the end of the line."""
        text = self.text
        line_end = _line_end(text, start)
        for at in [m.start() for m in re.finditer(r"[,}\]#]|//|/\*", text[start:line_end])] + [line_end - start]:
            word = text[start : start + at]
            if word.strip() in _LITERALS:
                return Node(start, start + len(word.rstrip()), _LITERALS[word.strip()])
            match = _NUMBER.fullmatch(word)
            if match is not None:
                return Node(start, start + len(word.rstrip()), _number(word.strip(), match, start))
        word = text[start:line_end].rstrip()
        self.note("bare-word", start, start + len(word), word)
        return Node(start, start + len(word), word)


def _number(word: str, match: re.Match[str], offset: int) -> int | float:
    """Return an int or a float; a whole float below 1e10 comes as an int, as in DeepSpeed's reader."""
    if len(word) > MAX_DIGITS:
        raise TextError(f"a number has more than {MAX_DIGITS} digits", offset, "write a number of reasonable length")
    if not (match.group(1) or match.group(2)):
        return int(word)
    value = float(word)
    if abs(value) == float("inf"):
        raise TextError(f"the number {word} is infinite", offset, "write a finite number")
    return int(value) if abs(value) < 1e10 and value == int(value) else value


def _line_end(text: str, at: int) -> int:
    ends = [found for found in (text.find("\n", at), text.find("\r", at)) if found >= 0]
    return min(ends, default=len(text))


def parse(text: str) -> Parsed:
    """Read `text`; raises TextError where DeepSpeed's reader fails too."""
    reader = _Reader(text)
    try:
        return _parse(text, reader)
    except TextError as error:
        # the reader failed far after the cause: a bare word that has swallowed the brackets after it
        for oddity in reader.oddities:
            word = re.match(r"(True|False|None)\b", oddity.detail)
            if oddity.kind == "bare-word" and word is not None and oddity.end > oddity.start + word.end():
                message = f"{word[1]} is Python, not JSON: what follows it on the line is read as part of the word"
                raise TextError(message, oddity.start, f"write {_OF_PYTHON[word[1]]}") from error
        missing = _missing_closer(text, error.offset)
        if missing is not None and _reads_on(text, missing, error.offset):
            raise _never_closed(missing) from error
        raise


@dataclass
class _Open:
    """An open brace or bracket: its line's number and indentation, and whether what it holds is indented more."""

    bracket: str
    line: int
    indent: int
    is_indented: bool | None = None  # None: nothing on a line of its own has come yet


@dataclass(frozen=True)
class _Missing:
    """The offset at which the counterpart of an open brace or bracket is missing."""

    opened: _Open
    offset: int


def _missing_closer(text: str, failed: int) -> _Missing | None:
    """Return where a brace or bracket seems to be missing before the offset at which reading has failed, or None.

    A reader notices it only far below, often at the end of the file. The indentation says where it belongs, if there is
    any: what an object holds is indented more than the line that opens it, and its end is not indented less.
    """
    opened: list[_Open] = []
    line = 1
    line_start = 0
    indent = len(text) - len(text.lstrip(" \t"))
    for token in _TOKEN.finditer(text):
        word = token[0]
        at = token.start()
        if at > failed:
            return None
        if word[0] == "\n":
            line += 1
            line_start = at + 1
            indent = len(word) - 1
            head = text[token.end() : token.end() + 1]
            if head and head not in "\r\n}]#/":
                if opened and opened[-1].is_indented is None:
                    opened[-1].is_indented = indent > opened[-1].indent
                if any(each.is_indented and indent <= each.indent for each in opened):
                    return _missing_before(text, opened[-1], line_start)
        elif word in _CLOSERS:
            is_last = text[token.end() : _line_end(text, token.end())].strip() == ""
            outer = opened[-1].is_indented if opened else None
            opened.append(_Open(word, line, indent, None if is_last else outer))
        elif word in ("}", "]"):
            if not opened:
                return None
            comes_first = not text[line_start:at].strip()
            is_outer = comes_first and opened[-1].is_indented and indent < opened[-1].indent
            if all(_CLOSERS[each.bracket] != word for each in opened):
                return None  # it closes nothing
            if _CLOSERS[opened[-1].bracket] != word or is_outer:
                return _missing_before(text, opened[-1], line_start if comes_first else at)
            opened.pop()
    return _missing_before(text, opened[-1], len(text)) if opened and failed >= len(text.rstrip()) else None


def _missing_before(text: str, opened: _Open, end: int) -> _Missing:
    return _Missing(opened, len(text[:end].rstrip().rstrip(",").rstrip()))


def _reads_on(text: str, missing: _Missing, failed: int) -> bool:
    """Return whether the text can be read farther with the missing bracket; else indentation has misled us.

    At the end of the text several may be missing, of which one by itself leads no farther.
    """
    closed = text[: missing.offset] + _CLOSERS[missing.opened.bracket] + text[missing.offset :]
    try:
        _parse(closed, _Reader(closed))
    except TextError as error:
        gained = error.offset - failed - 1  # without the bracket itself
        return gained > 0 or (gained == 0 and failed >= len(text.rstrip()))
    return True


def _never_closed(missing: _Missing) -> TextError:
    opened = missing.opened
    name = "brace" if opened.bracket == "{" else "bracket"
    message = f"a closing {name} is missing here, for the one that opens on line {opened.line}"
    return TextError(message, missing.offset, f"add {_CLOSERS[opened.bracket]}")


def _parse(text: str, reader: _Reader) -> Parsed:
    at = reader.skip(1 if text.startswith("\ufeff") else 0)
    if at == len(text):
        return Parsed(Node(at, at, members=()), (NonJsonSyntax("bare-root", 0, 0, "empty"),))
    if text[at] in "{[":
        root = reader.value(at, 0)
    elif re.match(r"[^\s{}\[\],]+\s*:", text[at:]) or re.match(r"\"[^\"\n]*\"\s*:", text[at:]):
        reader.note("bare-root", at, at + 1)
        root = reader.members(at, at, 0, closing="")
    else:
        root = reader.value(at, 0)
    rest = reader.skip(root.end)
    if rest < len(text):
        raise TextError("text follows the end of the config", rest)
    return Parsed(root, tuple(reader.oddities))
