"""Read the rows of a .json file: an array of objects, an object with such an array under "data", or one object a line.

The elements of an array are parsed one at a time, so only the text of a long array is in memory, and each element has
a line number for messages.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.data.rows.tools import with_unique_names
from harness.errors import UserError

_SPACE = re.compile(r"[ \t\r\n]*")
_BLANK = " \t\r\n"
_READ_AT_FIRST = 1 << 16
_DECODER = json.JSONDecoder(object_pairs_hook=with_unique_names)
DATA = "data"


def is_whole(file: Path) -> bool:
    """Return whether a .json file is one array or object, not one object a line; read no more than needed."""
    # The first line decides: a complete object, without a list under "data", means one object a line.
    for text, is_all in _beginnings(file, "replace"):
        begin = text.lstrip(_BLANK)
        if begin.startswith("["):
            return True
        first, newline, _ = begin.partition("\n")
        try:
            if newline or is_all:
                row = json.loads(first)
                return isinstance(row, dict) and isinstance(row.get(DATA), list)
            if begin:
                _begin_of_array(file, begin)
                return True
        except (ValueError, RecursionError, UserError):
            if newline or is_all:
                return True
    return True


def first_row(file: Path) -> tuple[str, object] | None:
    """Return (place, first element) of a file's array; None if it is empty. The rest of the file is not read."""
    with _json_errors(file):
        for text, is_all in _beginnings(file, "strict"):
            try:
                return next(_elements(file, text, _begin_of_array(file, text)), None)
            except json.JSONDecodeError:
                if is_all:
                    raise
    return None


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """Yield (place, element) for each element of a file's array. UserError if the file is not JSON or has no array."""
    with _json_errors(file):
        text = file.read_bytes().decode("utf-8-sig")
        yield from _elements(file, text, _begin_of_array(file, text))


def _beginnings(file: Path, errors: str) -> Iterator[tuple[str, bool]]:
    """Yield longer and longer beginnings of a file's text, each with whether it is the whole text."""
    decoder = getincrementaldecoder("utf-8-sig")(errors)
    text = ""
    size = _READ_AT_FIRST
    with file.open("rb") as stream:
        is_all = False
        while not is_all:
            # The decoder may hold the first bytes of a character that the last read cut.
            before = stream.tell() - len(decoder.getstate()[0])
            content = stream.read(size)
            is_all = len(content) < size
            try:
                text += decoder.decode(content, is_all)
            except UnicodeDecodeError as error:
                error.start += before  # counted from the beginning of the file
                raise
            yield text, is_all
            size *= 4


@contextmanager
def _json_errors(file: Path) -> Iterator[None]:
    """Turn the errors of parsing JSON into UserError with file and line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}): convert it") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno} is not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise UserError(f"{file} is nested too deeply to be read as JSON") from error
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise UserError(f"{file} is not JSON that can be read ({error})") from error


def _begin_of_array(file: Path, text: str) -> int:
    """Return the index after the bracket that opens the array of rows. UserError if there is no such array."""
    at = _behind_space(text, 0)
    if text[at : at + 1] == "[":
        return at + 1
    if text[at : at + 1] == "{":
        at = _behind_space(text, at + 1)
        while text[at : at + 1] == '"':
            name, at = _name(text, at)
            if name == DATA and text[at : at + 1] == "[":
                return at + 1
            _, at = _DECODER.raw_decode(text, at)
            at = _behind_space(text, at)
            if text[at : at + 1] != ",":
                break
            at = _behind_space(text, at + 1)
        _behind(text, at, "}")
    else:
        _DECODER.raw_decode(text, at)
    raise UserError(f'{file}: give an array of objects, an object with an array under "{DATA}", or one object a line')


def _elements(file: Path, text: str, at: int) -> Iterator[tuple[str, object]]:
    line, counted = 1, 0
    at = _behind_space(text, at)
    more = text[at : at + 1] != "]"
    while more:
        line += text.count("\n", counted, at)
        counted = at
        try:
            row, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError:  # a ValueError too, which `_json_errors` words better
            raise
        except ValueError as error:
            raise UserError(f"{file}:{line} is not JSON that can be read ({error})") from error
        yield f"{file}:{line}", row
        at = _behind_space(text, end)
        more = text[at : at + 1] != "]"
        if more:
            at = _behind_space(text, _behind(text, at, ","))
    _require_end(text, at + 1)


def _require_end(text: str, at: int) -> None:
    """Raise JSONDecodeError for text after the array and its object, so that no second array is silently ignored."""
    at = _behind_space(text, at)
    if text[_behind_space(text, 0)] == "{":
        while text[at : at + 1] == ",":
            _, at = _name(text, _behind_space(text, at + 1))
            _, at = _DECODER.raw_decode(text, at)
            at = _behind_space(text, at)
        at = _behind_space(text, _behind(text, at, "}"))
    if at < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _name(text: str, at: int) -> tuple[str, int]:
    """Return a name of an object, and the index of its value."""
    name, at = _DECODER.raw_decode(text, at)
    return name, _behind_space(text, _behind(text, _behind_space(text, at), ":"))


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _behind(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise json.JSONDecodeError(f"Expecting '{character}'", text, at)
    return at + 1
