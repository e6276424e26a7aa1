"""Read untrusted JSON in bounded time and memory.

Files in the folder of a run or a checkpoint may have been edited, truncated or put there by others. A pipe or a device
would block a reader forever, deep nesting overflows the stack, and integers of hundreds of digits break arithmetic with
floats. Each of these raises ValueError with a short message.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from harness.config.values.json_object import JsonObject
from harness.errors import UserError

T = TypeVar("T")

MOST_BYTES = 1 << 28
MOST_DEPTH = 64
MOST_DIGITS = 100  # transformers writes an integer of 31 for "no limit"


def regular_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file.

    Raises OSError if it cannot be read, and ValueError if it is not a regular file or has more than `most` bytes.
    """
    # Before opening it: opening alone makes some devices act.
    _require_regular(path.stat().st_mode)
    # Non-blocking, in case a pipe takes the file's place in the meantime.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        now = os.fstat(file.fileno())
        _require_regular(now.st_mode)
        # `read(n)` allocates n bytes at once, which a process that is short of memory may not have.
        content = file.read(-1 if most is None else min(most, now.st_size) + 1)
        # It has grown, or is a file in /proc, which has no size.
        if most is not None and content and now.st_size < len(content) <= most:
            content += file.read(most + 1 - len(content)) or b""
    # Of some files of the kernel, which wait for content.
    if content is None:
        raise ValueError("it has no content now")
    if most is not None and len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def require_regular_files(folder: Path) -> None:
    """Raise UserError if a folder contains a pipe, a socket or a device, as reading it could block forever."""
    for path in sorted(folder.iterdir()):
        with suppress(OSError):  # a link to nowhere
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise UserError(f"{path}: is a {_kind(mode)}, not a file: remove it")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file. Raises OSError if it cannot be read, ValueError if it is not valid."""
    return parse_json(regular_bytes(path, most))


def read_object(path: Path, most: int = MOST_BYTES) -> JsonObject:
    """Return the object in a JSON file. Raises OSError if it cannot be read, ValueError if it is not one object."""
    content = read_json(path, most)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def member(content: JsonObject, name: str, kind: type[T]) -> T:
    """Return a member of a JSON object. Raises ValueError if it is missing or of another type; true is not an int."""
    value = content.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} is missing" if name not in content else f"{name} is {str(value)[:60]!r}")
    return value


def object_or_empty(path: Path) -> JsonObject:
    """Return the object in a JSON file; {} if the file is absent, damaged, or holds something else."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def objects_of_lines(content: bytes) -> Iterator[JsonObject]:
    """Yield the JSON object on each line, without lines that hold none: a run that is killed cuts off its last one."""
    for line in content.splitlines():
        with suppress(ValueError):
            if isinstance(row := parse_json(line), dict):
                yield row


def parse_json(text: bytes | str) -> Any:
    """Return the content of a JSON text. Raises ValueError if it is not valid."""
    try:
        content = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_int=_integer)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    # Level by level, as a recursion would overflow the stack on what it is to find.
    level = [content]
    depth = 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError("its values are nested too deeply")
        level = [inner for value in level for inner in _inner(value)]
        depth += 1
    return content


def _inner(value: object) -> list[Any]:
    """Return the arrays and objects directly inside an array or object."""
    match value:
        case dict():
            values = list(value.values())
        case list():
            values = value
        case _:
            return []
    return [each for each in values if isinstance(each, dict | list)]


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"it is a {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    return {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}.get(stat.S_IFMT(mode), "device")
