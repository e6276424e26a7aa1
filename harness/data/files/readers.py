"""How the rows of a file, or of an extent of it, are read, each with its place, in the order of the file.

A reader raises UserError with the file and the line, row or byte that cannot be used; an OSError is left to
the caller. What a row means is `rows.py`'s to say.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from harness.data.files.extents import Extent, whole
from harness.data.files.json_rows import first_row, is_whole, json_rows
from harness.data.files.parquet import parquet_rows, parquet_schema
from harness.data.files.rows import BESIDE, COLUMNS, TEXT, document, kind_of_row, plain_row, with_unique_names
from harness.data.pieces import PIECE_CHARACTERS, in_pieces
from harness.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")

Row: TypeAlias = tuple[str, object]
"""A place as the user would name it, and what stands there."""

_LONGEST_REST = 3  # bytes of a character in UTF-8 after its first


def read_documents_of(extent: Extent, kind: str) -> Iterator[dict[str, str | int]]:
    """Read the documents of a part of a file whose rows are of this kind, text in pieces. Any other file is one."""
    reader = _READERS.get(Path(extent.file).suffix)
    if reader is None:
        yield from _txt_pieces(extent)
        return
    for place, row in reader(extent):
        yield from in_pieces(document(_object(row, place), kind, place))


def kind_of_file(file: Path) -> str | None:
    """Return what the rows of a file are, by its first row or its schema, which is looked at; None if it has no row."""
    if file.suffix == ".parquet":
        schema = parquet_schema(file)
        _require_unlike(schema.columns, str(file))
        kind = kind_of_row(schema.columns, str(file))
        return kind if any(rows for rows, _ in schema.groups) else None
    reader = _READERS.get(file.suffix)
    if reader is None:
        with file.open("rb"):  # it can be read at all
            return TEXT
    is_array = file.suffix == ".json" and is_whole(file)
    found = first_row(file) if is_array else next(reader(whole(file)), None)
    if found is None:
        return None
    place, row = found[0], _object(found[1], found[0])
    kind = kind_of_row(row, place)
    document(row, kind, place)
    return kind


def decodes(file: Path) -> bool:
    """Whether the file is UTF-8 throughout and can be read at all."""
    try:
        file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _txt_pieces(extent: Extent) -> Iterator[dict[str, str | int]]:
    """Pieces of one document: the file's bytes as UTF-8, newlines and byte order mark left as they are.

    A character on the border of two pieces belongs to the one that it begins in, so each is read by itself.
    """
    with Path(extent.file).open("rb") as stream:
        for start in range(extent.start, max(extent.stop, extent.start + 1), PIECE_CHARACTERS):
            stream.seek(start)
            content = stream.read(PIECE_CHARACTERS + _LONGEST_REST)
            first = _rest_of_character(content) if start else 0
            last = PIECE_CHARACTERS + _rest_of_character(content[PIECE_CHARACTERS:])
            try:
                text = content[first:last].decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"byte {start + first + error.start} is 0x{error.object[error.start]:02x}"
                raise UserError(f"{extent.file} is not UTF-8 ({place}): convert it") from error
            if text or start == 0:
                yield {"text": text, "part": start // PIECE_CHARACTERS}


def _rest_of_character(content: bytes) -> int:
    """Return how many bytes at the beginning continue a character that began before."""
    rest = content[:_LONGEST_REST]
    return next((at for at, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))


def _jsonl_rows(extent: Extent) -> Iterator[Row]:
    """One row a line; blank lines are passed over."""
    with Path(extent.file).open("rb") as lines:
        if extent.start:
            lines.seek(extent.start - 1)
            lines.readline()  # the end of a line that began before
        at = lines.tell()
        for number, line in enumerate(lines, start=extent.before + 1):
            if at >= extent.stop:
                return
            at += len(line)
            if line.strip():
                place = f"{extent.file}:{number}"
                yield place, _of_line(line, place)


def _json_rows(extent: Extent) -> Iterator[Row]:
    """One row an element of an array, or one a line."""
    file = Path(extent.file)
    return json_rows(file) if is_whole(file) else _jsonl_rows(extent)


def _csv_rows(extent: Extent) -> Iterator[Row]:
    """One row a record below the header; an empty field is none."""
    csv.field_size_limit(sys.maxsize)
    with Path(extent.file).open(encoding="utf-8-sig", newline="") as stream:
        records, read = csv.DictReader(stream, strict=True), 0
        try:
            _require_unlike(records.fieldnames or (), extent.file)
            if records.fieldnames:  # the header is read
                read = records.reader.line_num
            for record in records:
                read = records.reader.line_num  # the records' own number leaves out blank lines
                place = f"{extent.file}:{read}"
                if None in record or None in record.values():
                    raise UserError(f"{place} has not as many fields as the header: quote fields that contain a comma")
                yield place, record
        except csv.Error as error:
            raise UserError(f"{extent.file}:{read + 1} is not CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{extent.file} is not UTF-8 after line {read}: convert it") from error


def _parquet_rows(extent: Extent) -> Iterator[Row]:
    """One row a row, of the columns that say something."""
    file = Path(extent.file)
    names = parquet_schema(file).columns
    kind = kind_of_row(names, str(file))
    columns = [name for name in (*COLUMNS[kind], *BESIDE[kind]) if name in names]
    for number, row in parquet_rows(file, range(extent.start, extent.stop), columns, extent.before):
        yield f"{file}, row {number}", plain_row(row)


_READERS: Mapping[str, Callable[[Extent], Iterator[Row]]] = MappingProxyType(
    {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
)


def _of_line(line: bytes, place: str) -> object:
    try:
        return json.loads(line, object_pairs_hook=with_unique_names)
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 (byte {error.start} of the line): convert the file") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON ({error.msg}, column {error.colno}): one object a line") from error
    except RecursionError as error:
        raise UserError(f"{place} is nested too deeply to be read as JSON") from error
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise UserError(f"{place} is not JSON that can be read ({error})") from error


def _object(row: object, place: str) -> Mapping[str, object]:
    if not isinstance(row, Mapping):
        raise UserError(f'{place} is not an object: each row is {{"text": "..."}} or {{"messages": [...]}}')
    return row


def _require_unlike(names: Sequence[str], file: str) -> None:
    """Refuse two columns of one name, of which the last would win."""
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file} has two columns `{twice}`: rename one")
