"""Parts of source files that can be read by themselves: by these the reading is shared out, and what is done is kept.

An extent of a .jsonl file is the lines that begin in a range of its bytes, of a .parquet file some of its row groups,
of a .txt file, which is one text, the pieces that begin in a range of its bytes. A .csv file, and a .json file that is
one array, is read as a whole. The plan is a function of the files alone. Lines are numbered in messages, so those of a
long file are counted once, and the plan is kept.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

from harness.data.files.json_rows import is_whole
from harness.data.files.parquet import parquet_schema
from harness.data.on_disk.shards import SHARD_BYTES, make_shards, shard_bytes
from harness.data.pieces import PIECE_CHARACTERS
from harness.errors import UserError

_COUNTED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Extent:
    """A part of a file.

    Attributes:
        start, stop: the first byte and the last + 1; of a parquet file, row groups.
        before: lines or rows of the file before the first one of this part.
        size: about how many bytes of text it is.
    """

    file: str
    start: int
    stop: int
    before: int = 0
    size: int = 0


def whole(file: Path) -> Extent:
    """Return all of a file as one extent."""
    if file.suffix == ".parquet":
        return Extent(str(file), 0, len(parquet_schema(file).groups))
    return Extent(str(file), 0, file.stat().st_size)


def planned(files: Sequence[Path], folder: Path) -> list[list[Extent]]:
    """Return the extents of each shard of these files, read from `folder` if they were planned before."""

    def write(place: Path, _: None) -> None:
        shards = [[astuple(extent) for extent in extents] for extents in _plan(files)]
        (place / "shards.json").write_text(json.dumps(shards), encoding="utf-8")

    (place,) = make_shards(folder / "plan", [None], write, doing="counting lines")
    shards = json.loads((place / "shards.json").read_text(encoding="utf-8"))
    return [[Extent(*extent) for extent in extents] for extents in shards]


def _plan(files: Sequence[Path]) -> list[list[Extent]]:
    """Put extents, in the order of the files, into shards of about one size."""
    size = shard_bytes(sum(file.stat().st_size for file in files))
    shards: list[list[Extent]] = [[]]
    filled = 0
    for file in files:
        for extent in _extents(file, size):
            if filled >= size:
                shards.append([])
                filled = 0
            shards[-1].append(extent)
            filled += extent.size
    return shards


def _extents(file: Path, size: int) -> Iterator[Extent]:
    """Give the parts of a file, each of about `size` bytes of text."""
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
        else:  # a text, though it be empty; its pieces are counted from its beginning
            starts = range(0, max(total, 1), -(-size // PIECE_CHARACTERS) * PIECE_CHARACTERS)
            before = [0] * len(starts)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    for start, lines in zip(starts, before, strict=True):
        stop = min(start + starts.step, total)
        yield Extent(str(file), start, stop, lines, stop - start)


def in_order(file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:
    """Give the parts of a file from one on, one after the other: nothing behind them is read beforehand.

    Args:
        start, before: where the first part begins, and the lines or rows of the file before it.
    """
    if file.suffix == ".parquet":
        yield from itertools.islice(_row_groups(file), start, None)
        return
    total, has_lines = file.stat().st_size, file.suffix in (".jsonl", ".json")
    if file.suffix == ".csv" or (file.suffix == ".json" and is_whole(file)):
        yield Extent(str(file), 0, total, 0, total)
        return
    for begin in range(start, max(total, start + 1), SHARD_BYTES):  # a text, though it be empty
        stop = min(begin + SHARD_BYTES, total)
        yield Extent(str(file), begin, stop, before, stop - begin)
        if has_lines and stop < total:
            with file.open("rb") as stream:
                stream.seek(max(begin - 1, 0))
                before += stream.read(stop - 1 - stream.tell()).count(b"\n") + (begin == 0)


def _row_groups(file: Path) -> Iterator[Extent]:
    before = 0
    for index, (rows, size) in enumerate(parquet_schema(file).groups):
        yield Extent(str(file), index, index + 1, before, size)
        before += rows


def _lines_before(stream: BinaryIO, starts: Sequence[int]) -> Iterator[int]:
    """Give how many lines of a file begin before each of these bytes, which ascend."""
    newlines = at = 0
    for start in starts:
        while at < start - 1:
            content = stream.read(min(_COUNTED_AT_ONCE, start - 1 - at))
            newlines += content.count(b"\n")
            at += len(content) or start  # a file that has become shorter: there is nothing more to count
        yield newlines + 1 if start else 0
