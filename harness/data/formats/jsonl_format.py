"""A .jsonl file, with one object a line: its extents are the lines that begin in a range of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from harness.data.formats.format import Extent, Row, RowFormat
from harness.data.on_disk.shards import SHARD_BYTES
from harness.data.rows.tools import with_unique_names
from harness.errors import UserError

_COUNTED_AT_ONCE = 1 << 20  # bytes of a read when lines are counted


class JsonlFormat(RowFormat):
    """One object a line. Blank lines are skipped."""

    suffix = ".jsonl"

    def extents(self, file: Path, size: int) -> Iterator[Extent]:
        """Cut a file into ranges of `size` bytes. The lines of a long file are counted, as messages name them."""
        total = file.stat().st_size
        starts = range(0, total, size)
        with file.open("rb") as stream:
            before = list(_lines_before(stream, starts)) if len(starts) > 1 else [0] * len(starts)
        for start, lines in zip(starts, before, strict=True):
            stop = min(start + size, total)
            yield Extent(str(file), start, stop, lines, stop - start)

    def in_order(self, file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:
        """Yield the extents of a file from byte `start` on, which has `before` lines before it."""
        total = file.stat().st_size
        for begin in range(start, max(total, start + 1), SHARD_BYTES):
            stop = min(begin + SHARD_BYTES, total)
            yield Extent(str(file), begin, stop, before, stop - begin)
            if stop < total:
                with file.open("rb") as stream:
                    # A line begins at byte 0 and after each newline. Count those that begin before the next extent.
                    stream.seek(max(begin - 1, 0))
                    before += stream.read(stop - 1 - stream.tell()).count(b"\n") + (begin == 0)

    def rows(self, extent: Extent) -> Iterator[Row]:
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


FORMAT = JsonlFormat()


def _lines_before(stream: BinaryIO, starts: Sequence[int]) -> Iterator[int]:
    """Yield, for each of these ascending byte positions, the number of lines that begin before it."""
    newlines = at = 0
    for start in starts:
        while at < start - 1:
            content = stream.read(min(_COUNTED_AT_ONCE, start - 1 - at))
            newlines += content.count(b"\n")
            at += len(content) or start  # nothing read: the file was truncated meanwhile, so end the loop
        yield newlines + 1 if start else 0


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
