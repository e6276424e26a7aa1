"""Read the rows of a file, or of an extent of it, in order, each with its location (file and line, for messages).

Extents are the unit in which processes share the reading and in which results are kept. An extent is

- of a .jsonl file: the lines that begin in a range of bytes;
- of a .parquet file: some row groups;
- of a .txt file, which is one text: the pieces that begin in a range of bytes;
- of a .csv file, or a .json file that is one array: the whole file.

Extents depend on the files alone, never on the number of processes. A reader raises UserError with the file and the
line, row or byte that it cannot use, and passes an OSError on to the caller.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from harness.data.files.json_rows import first_row, is_whole, json_rows
from harness.data.files.pieces import PIECE_CHARACTERS, in_pieces
from harness.data.files.rows import BESIDE, COLUMNS, TEXT, document, kind_of_row, plain_row
from harness.data.files.tools import with_unique_names
from harness.data.on_disk.shards import SHARD_BYTES, make_shards, shard_bytes
from harness.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")

Row: TypeAlias = tuple[str, object]
"""(location, row): the location as messages name it, such as `chat.jsonl:12`, and the parsed row."""

_COUNTED_AT_ONCE = 1 << 20  # bytes of a read when lines are counted
_ROWS_AT_ONCE = 64  # rows of a parquet file in memory
_LONGEST_REST = 3  # a UTF-8 character has at most this many bytes after its first


@dataclass(frozen=True)
class Extent:
    """A part of a file that can be read by itself.

    Attributes:
        start, stop: the first byte and the last + 1; for a parquet file the first row group and the last + 1.
        before: number of lines or rows of the file before this extent.
        size: approximate size in bytes of text.
    """

    file: str
    start: int
    stop: int
    before: int = 0
    size: int = 0


def whole(file: Path) -> Extent:
    """Return a file as one extent."""
    if file.suffix == ".parquet":
        return Extent(str(file), 0, len(_parquet_schema(file).groups))
    return Extent(str(file), 0, file.stat().st_size)


def planned(files: Sequence[Path], folder: Path) -> list[list[Extent]]:
    """Return the extents of each shard of these files, in order; all shards are about equally large.

    Messages name line numbers, so the lines of a long file are counted, once: the plan is cached in `folder`.
    """

    def write(shard: Path, _: None) -> None:
        size = shard_bytes(sum(file.stat().st_size for file in files))
        shards: list[list[tuple[object, ...]]] = [[]]
        filled = 0
        for extent in (extent for file in files for extent in _extents(file, size)):
            if filled >= size:
                shards.append([])
                filled = 0
            shards[-1].append(astuple(extent))
            filled += extent.size
        (shard / "shards.json").write_text(json.dumps(shards), encoding="utf-8")

    (shard,) = make_shards(folder / "plan", [None], write, doing="counting lines")
    shards = json.loads((shard / "shards.json").read_text(encoding="utf-8"))
    return [[Extent(*extent) for extent in extents] for extents in shards]


def _extents(file: Path, size: int) -> Iterator[Extent]:
    """Cut a file into extents of about `size` bytes of text."""
    try:
        if file.suffix == ".parquet":
            yield from _row_groups(file)
            return
        total = file.stat().st_size
        if file.suffix == ".csv" or (file.suffix == ".json" and is_whole(file)):
            yield Extent(str(file), 0, total, 0, total)
            return
        if file.suffix in (".jsonl", ".json"):
            starts = range(0, total, size)
            with file.open("rb") as stream:
                before = list(_lines_before(stream, starts)) if len(starts) > 1 else [0] * len(starts)
        else:  # a .txt file, perhaps empty. Its pieces are numbered by their position, so an extent holds whole pieces.
            starts = range(0, max(total, 1), -(-size // PIECE_CHARACTERS) * PIECE_CHARACTERS)
            before = [0] * len(starts)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    for start, lines in zip(starts, before, strict=True):
        stop = min(start + starts.step, total)
        yield Extent(str(file), start, stop, lines, stop - start)


def in_order(file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:
    """Yield the extents of a file from `start` on, for a stream: nothing after the current extent is read.

    Args:
        start: the first byte, or row group, of the first extent.
        before: number of lines or rows of the file before it.
    """
    if file.suffix == ".parquet":
        yield from itertools.islice(_row_groups(file), start, None)
        return
    total, has_lines = file.stat().st_size, file.suffix in (".jsonl", ".json")
    if file.suffix == ".csv" or (file.suffix == ".json" and is_whole(file)):
        yield Extent(str(file), 0, total, 0, total)
        return
    for begin in range(start, max(total, start + 1), SHARD_BYTES):  # an empty text has an extent, too
        stop = min(begin + SHARD_BYTES, total)
        yield Extent(str(file), begin, stop, before, stop - begin)
        if has_lines and stop < total:
            with file.open("rb") as stream:
                # A line begins at byte 0 and after each newline. Count those that begin before the next extent.
                stream.seek(max(begin - 1, 0))
                before += stream.read(stop - 1 - stream.tell()).count(b"\n") + (begin == 0)


def _row_groups(file: Path) -> Iterator[Extent]:
    before = 0
    for index, (rows, size) in enumerate(_parquet_schema(file).groups):
        yield Extent(str(file), index, index + 1, before, size)
        before += rows


def _lines_before(stream: BinaryIO, starts: Sequence[int]) -> Iterator[int]:
    """Yield, for each of these ascending byte positions, the number of lines that begin before it."""
    newlines = at = 0
    for start in starts:
        while at < start - 1:
            content = stream.read(min(_COUNTED_AT_ONCE, start - 1 - at))
            newlines += content.count(b"\n")
            at += len(content) or start  # nothing read: the file was truncated meanwhile, so end the loop
        yield newlines + 1 if start else 0


def read_documents_of(extent: Extent, kind: str) -> Iterator[dict[str, str | int]]:
    """Yield the documents of an extent whose rows are of this kind; long text in pieces. UserError for a bad row."""
    reader = _READERS.get(Path(extent.file).suffix)
    if reader is None:
        yield from _txt_pieces(extent)
        return
    for location, row in reader(extent):
        yield from in_pieces(document(_object(row, location), kind, location))


def kind_of_file(file: Path) -> str | None:
    """Return the kind of a file's rows from its schema or first row; None if it has no row. UserError if unusable."""
    if file.suffix == ".parquet":
        schema = _parquet_schema(file)
        _require_distinct(schema.columns, str(file))
        kind = kind_of_row(schema.columns, str(file))
        return kind if any(rows for rows, _ in schema.groups) else None
    reader = _READERS.get(file.suffix)
    if reader is None:
        with file.open("rb"):  # raises OSError if it cannot be read
            return TEXT
    is_array = file.suffix == ".json" and is_whole(file)
    found = first_row(file) if is_array else next(reader(whole(file)), None)
    if found is None:
        return None
    location, row = found[0], _object(found[1], found[0])
    kind = kind_of_row(row, location)
    document(row, kind, location)
    return kind


def decodes(file: Path) -> bool:
    """Return whether the whole file can be read and is UTF-8."""
    try:
        file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _txt_pieces(extent: Extent) -> Iterator[dict[str, str | int]]:
    """Yield one document in pieces: the file's bytes as UTF-8, with newlines and byte order mark unchanged.

    A character across the border of two pieces belongs to the piece in which it begins, so each piece can be read
    independently.
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
                location = f"byte {start + first + error.start} is 0x{error.object[error.start]:02x}"
                raise UserError(f"{extent.file} is not UTF-8 ({location}): convert it") from error
            if text or start == 0:
                yield {"text": text, "part": start // PIECE_CHARACTERS}


def _rest_of_character(content: bytes) -> int:
    """Return the number of leading bytes that continue a UTF-8 character begun before (10xxxxxx)."""
    rest = content[:_LONGEST_REST]
    return next((at for at, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))


def _jsonl_rows(extent: Extent) -> Iterator[Row]:
    """Yield a row for each line that begins in the extent and is not blank."""
    with Path(extent.file).open("rb") as lines:
        if extent.start:
            # From one byte earlier: if that is a newline, the line at `start` begins here and must not be skipped.
            lines.seek(extent.start - 1)
            lines.readline()
        at = lines.tell()
        for number, line in enumerate(lines, start=extent.before + 1):
            if at >= extent.stop:
                return
            at += len(line)
            if line.strip():
                location = f"{extent.file}:{number}"
                yield location, _of_line(line, location)


def _json_rows(extent: Extent) -> Iterator[Row]:
    """Yield a row for each element of the array, or for each line."""
    file = Path(extent.file)
    return json_rows(file) if is_whole(file) else _jsonl_rows(extent)


def _csv_rows(extent: Extent) -> Iterator[Row]:
    """Yield a row for each record below the header."""
    csv.field_size_limit(sys.maxsize)
    with Path(extent.file).open(encoding="utf-8-sig", newline="") as stream:
        records, read = csv.DictReader(stream, strict=True), 0
        try:
            _require_distinct(records.fieldnames or (), extent.file)
            if records.fieldnames:  # the header is read
                read = records.reader.line_num
            for record in records:
                read = records.reader.line_num  # DictReader's own line_num does not count blank lines
                location = f"{extent.file}:{read}"
                if None in record or None in record.values():
                    raise UserError(
                        f"{location} does not have as many fields as the header: quote fields that contain a comma"
                    )
                yield location, record
        except csv.Error as error:
            raise UserError(f"{extent.file}:{read + 1} is not CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{extent.file} is not UTF-8 after line {read}: convert it") from error


def _parquet_rows(extent: Extent) -> Iterator[Row]:
    """Yield the rows of the extent's row groups; read only the columns that are used, a few rows at a time."""
    file, number = Path(extent.file), extent.before
    names = _parquet_schema(file).columns
    kind = kind_of_row(names, str(file))
    columns = [name for name in (*COLUMNS[kind], *BESIDE[kind]) if name in names]
    with _opened(file, "is damaged") as table:
        groups = list(range(extent.start, extent.stop))
        batches = iter(table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups, columns=columns))
        while True:
            with _arrow_errors(file, f"is damaged after row {number}"):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for row in rows:
                number += 1
                yield f"{file}, row {number}", plain_row(row)


@dataclass(frozen=True)
class ParquetSchema:
    """The column names of a parquet file, and (rows, bytes) of each of its row groups."""

    columns: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]


def _parquet_schema(file: Path) -> ParquetSchema:
    with _opened(file, "is not a parquet file") as table:
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        sizes = tuple((group.num_rows, group.total_byte_size) for group in groups)
        return ParquetSchema(tuple(table.schema_arrow.names), sizes)


@contextmanager
def _opened(file: Path, wrong: str) -> Iterator[ParquetFile]:
    from pyarrow.parquet import ParquetFile

    with _arrow_errors(file, wrong):
        table = ParquetFile(file, page_checksum_verification=True)
    with table:
        yield table


@contextmanager
def _arrow_errors(file: Path, wrong: str) -> Iterator[None]:
    """Turn pyarrow's errors into UserError; pass on an OSError of the operating system."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow raises OSError without a number itself
            raise
        raise UserError(f"{file} {wrong}: {' '.join(str(error).split()) or type(error).__name__}") from error


_READERS: Mapping[str, Callable[[Extent], Iterator[Row]]] = MappingProxyType(
    {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
)


def _of_line(line: bytes, location: str) -> object:
    try:
        return json.loads(line, object_pairs_hook=with_unique_names)
    except UnicodeDecodeError as error:  # before ValueError, its base class and that of JSONDecodeError
        raise UserError(f"{location} is not UTF-8 (byte {error.start} of the line): convert the file") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{location} is not JSON ({error.msg}, column {error.colno}): one object a line") from error
    except RecursionError as error:
        raise UserError(f"{location} is nested too deeply to be read as JSON") from error
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise UserError(f"{location} is not JSON that can be read ({error})") from error


def _object(row: object, location: str) -> Mapping[str, object]:
    if not isinstance(row, Mapping):
        raise UserError(f'{location} is not an object: each row is {{"text": "..."}} or {{"messages": [...]}}')
    return row


def _require_distinct(names: Sequence[str], file: str) -> None:
    """Raise UserError for two columns of one name: csv and Arrow would silently keep the last."""
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file} has two columns `{twice}`: rename one")
