"""A config file: its text, its data, and the line and column of everything in it.

`load` takes a path or the name of a packaged preset. For a file that cannot be read it raises ConfigError with one
finding that has the position.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.parser import Node, NonJsonSyntax, Parsed, TextError, parse
from harness.config.values.config_file import FROM_PROGRAM, PRESETS, preset_file
from harness.config.values.json_file import regular_bytes
from harness.config.values.json_object import JsonObject

# a section by its indentation
_YAML = re.compile(r"\A\s*---|^[\w-]+\s*:[ \t]*(#.*)?\n[ \t]+([\w-]+\s*:|- )", re.MULTILINE)
MAX_BYTES = 2 * 2**20  # the longest config seen in the wild has 20 kB


@dataclass(frozen=True)
class Document:
    """A config as it was read. `data` has the values that DeepSpeed's own reader gets from `text`."""

    path: str
    text: str
    parsed: Parsed

    @cached_property
    def data(self) -> JsonObject:
        """The config as plain Python values."""
        data: JsonObject = self.parsed.root.data()
        return data

    @property
    def oddities(self) -> tuple[NonJsonSyntax, ...]:
        """The places where the text is not plain JSON."""
        return self.parsed.oddities

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0] + [i + 1 for i, char in enumerate(self.text) if char == "\n"]

    def line_column(self, offset: int) -> tuple[int, int]:
        """Return line and column, counted from 1, of an offset into the text."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def span(self, pointer: str, *, of_value: bool = False) -> tuple[int, int]:
        """Return start and end of a JSON pointer's key, or of its value; of the nearest parent if it is absent."""
        node = self.parsed.root
        span = (self.parsed.root.start, self.parsed.root.start + 1)
        for step in pointer.split("/")[1:]:
            found = node.child(step.replace("~1", "/").replace("~0", "~"))
            if found is None:
                break
            if isinstance(found, Node):
                node = found
                span = (found.start, found.end)
            else:
                node = found.node
                span = (found.key_start, found.key_end)
                if of_value and not node.members:
                    span = (node.start, node.end)
        return span

    def locate(self, pointer: str) -> tuple[int, int]:
        """Return line and column of a JSON pointer's key, or of its nearest parent that exists."""
        return self.line_column(self.span(pointer)[0])


def load(source: str | Path) -> Document:
    """Read a config from a path, or a preset by its name ("zero3"). Raises ConfigError."""
    path = _find(str(source))
    return from_bytes(_read(path), str(path))


def from_bytes(raw: bytes, path: str) -> Document:
    """Read a config from a file's content. Raises ConfigError."""

    def refuse(message: str, hint: str) -> ConfigError:
        return ConfigError([unreadable(path, message, hint)])

    if len(raw) > MAX_BYTES:
        raise refuse(f"is larger than {MAX_BYTES >> 20} MiB", "a DeepSpeed config has a few kilobytes: check the path")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 at byte {error.start}", "save it as UTF-8") from None
    if "\0" in text:
        raise refuse("contains NUL bytes", "name a JSON text file, not a binary one")
    return from_text(text, path)


def from_text(text: str, path: str = "<text>") -> Document:
    """Read a config from its text; `path` is its name in findings. Raises ConfigError."""
    is_yaml = path.lower().endswith((".yaml", ".yml")) or _YAML.search(text)
    if is_yaml and not text.lstrip().startswith("{"):
        hint = "write the DeepSpeed config as JSON, { ... }; flags in YAML go into --config FILE"
        raise ConfigError([unreadable(path, "is YAML, not JSON", hint)])
    try:
        document = Document(path, text, parse(text))
    except TextError as error:
        broken = Document(path, text, Parsed(Node(0, 0), ()))
        line, column = broken.line_column(error.offset)
        hint = error.hint or "neither JSON nor DeepSpeed's own reader accepts this: correct the text"
        raise ConfigError([unreadable(path, error.message, hint, line, column)]) from None
    if document.parsed.root.members is None:
        what = "a list" if document.parsed.root.items is not None else "a single value"
        raise ConfigError([unreadable(path, f"the config is {what}, not an object", "write { ... }")])
    return document


def from_values(config: Mapping[str, object], path: str = FROM_PROGRAM) -> Document:
    """Return values from a program as a document; an empty `path`: nobody wrote them, and findings name no place."""
    return from_text(json.dumps(dict(config), indent=2), path)


def unreadable(path: str, message: str, hint: str, line: int = 1, column: int = 1) -> Diagnostic:
    """Return the finding for a file that cannot be read at all."""
    return Diagnostic(
        code="DS001",
        severity=Severity.ERROR,
        message=message,
        file=path,
        line=line,
        column=column,
        hint=hint,
        deepspeed="cannot read it either",
    )


def _find(source: str) -> Path:
    """Return the file that `source` names: a path, else a packaged preset."""
    if (preset := preset_file(source)) is not None:
        return preset
    if not os.path.lexists(source) and os.sep not in source:
        names = ", ".join(sorted(p.stem for p in PRESETS.glob("*.json"))) or "none"
        message = "no such file or preset"
        raise ConfigError([unreadable(source, message, f"name a JSON file or one of the presets: {names}")])
    return Path(source)


def _read(path: Path) -> bytes:
    """Return the content of a regular file."""

    def refuse(message: str, hint: str) -> ConfigError:
        return ConfigError([unreadable(str(path), message, hint)])

    try:
        if path.is_dir():
            raise refuse("is a directory", "name a JSON file in it")
        return regular_bytes(path, MAX_BYTES)
    except OSError as error:
        raise refuse((error.strerror or "cannot be read").lower(), "check the path and its permissions") from None
    except ValueError as error:  # a device, a pipe, a file that is too large, a NUL character in the path
        raise refuse(str(error).removeprefix("it "), "name a JSON file of a few kilobytes") from None
