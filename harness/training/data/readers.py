"""How the documents of one file are read: a generator a suffix, each yielding text in the order of the file.

A reader raises UserError with the file and the line, row or byte that cannot be used; an OSError is left to
the caller. Text is whole Unicode: what cannot be encoded as UTF-8 again is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from harness.config.errors import UserError

_ROWS_AT_ONCE = 1024


def read_txt(file: Path) -> Iterator[str]:
    """The one document of a .txt file: its bytes as UTF-8, newlines and byte order mark left as they are."""
    try:
        yield file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise UserError(f"{file} is not UTF-8 ({place}): convert it") from error


def read_jsonl(file: Path) -> Iterator[str]:
    """One document a line, the string under `text`; blank lines are passed over."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text_of_line(line, f"{file}:{number}")


def read_parquet(file: Path) -> Iterator[str]:
    """One document a row, the string in column `text`."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    _check_parquet_columns(file)
    row = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(text, f"{file}, row {row}")
    except ArrowInvalid as error:
        raise UserError(f"{file} is damaged after row {row}: {_one_line(error)}") from error


READERS: Mapping[str, Callable[[Path], Iterator[str]]] = MappingProxyType(
    {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
)


def check_head(file: Path) -> None:
    """Look at the first row, or the schema, of a file that is not empty. UserError if it has no `text`."""
    if file.suffix == ".jsonl":
        next(read_jsonl(file), None)
    elif file.suffix == ".parquet":
        _check_parquet_columns(file)


def decodes(file: Path) -> bool:
    """Whether the file is UTF-8 throughout and can be read at all."""
    try:
        file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _text_of_line(line: bytes, place: str) -> str:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 (byte {error.start} of the line): convert the file") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON ({error.msg}, column {error.colno}): one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f'{place} is not an object: each line is {{"text": "..."}}')
    if "text" not in row:
        raise UserError(f"{place} has no column `text` (it has: {', '.join(row) or 'none'}): rename one to `text`")
    return _checked(row["text"], place)


def _checked(text: object, place: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{place}: `text` is {'missing' if text is None else type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: `text` holds half a surrogate pair at character {error.start}") from error
    return text


def _check_parquet_columns(file: Path) -> None:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_schema

    try:
        names = read_schema(file).names
    except ArrowInvalid as error:
        raise UserError(f"{file} is not a parquet file: {_one_line(error)}") from error
    if "text" not in names:
        raise UserError(f"{file} has no column `text` (it has: {', '.join(names) or 'none'}): rename one to `text`")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
