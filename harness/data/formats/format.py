"""A format of data files: how a file is cut into extents, and how an extent is read.

Extents are the unit in which processes share the reading and in which results are kept. They depend on the file alone,
never on the number of processes. A format raises UserError with the file and the line, row or byte that it cannot use,
and passes an OSError on to the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from harness.data.on_disk.shards import SHARD_BYTES
from harness.data.rows.kinds import document, kind_of_row
from harness.data.rows.pieces import in_pieces
from harness.errors import UserError

Row: TypeAlias = tuple[str, object]
"""(location, row): the location as messages name it, such as `chat.jsonl:12`, and the parsed row."""


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


class Format(ABC):
    """A format of data files. By default a file is one extent, as it can only be read from its beginning.

    Attributes:
        suffix: of the files' names, from their last dot: ".gz" of "a.jsonl.gz".
        describes_data: whether such a file counts as data in a directory only if that holds no other data files.
    """

    suffix: ClassVar[str]
    describes_data: ClassVar[bool] = False

    @abstractmethod
    def kind(self, file: Path) -> str | None:
        """Return the kind of a file's rows, as in `rows/kinds.py`, by schema or first row; None if it has no row."""

    @abstractmethod
    def documents(self, extent: Extent, kind: str) -> Iterator[dict[str, str | int]]:
        """Yield the documents of an extent whose rows are of this kind; long text in pieces."""

    def whole(self, file: Path) -> Extent:
        """Return a file as one extent."""
        return Extent(str(file), 0, file.stat().st_size)

    def extents(self, file: Path, size: int) -> Iterator[Extent]:  # noqa: ARG002
        """Cut a file into extents of about `size` bytes of text."""
        total = file.stat().st_size
        yield Extent(str(file), 0, total, 0, total)

    def in_order(self, file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:  # noqa: ARG002
        """Yield the extents of a file from `start` on, for a stream: nothing after the current extent is read.

        Args:
            start: the first byte, or row group, of the first extent.
            before: number of lines or rows of the file before it.
        """
        return self.extents(file, SHARD_BYTES)


class RowFormat(Format):
    """A format whose files have rows, each an object."""

    @abstractmethod
    def rows(self, extent: Extent) -> Iterator[Row]:
        """Yield the rows of an extent."""

    def whole_rows(self, extent: Extent) -> Iterator[Row]:
        """Yield the rows of an extent with all their columns, also those that no kind of `rows/kinds.py` has."""
        return self.rows(extent)

    def first_row(self, file: Path) -> Row | None:
        """Return the first row of a file; None if it has none."""
        return next(self.rows(self.whole(file)), None)

    def kind(self, file: Path) -> str | None:
        """Return the kind of the first row, which is checked; None without any."""
        found = self.first_row(file)
        if found is None:
            return None
        location = found[0]
        row = _object(*found)
        kind = kind_of_row(row, location)
        document(row, kind, location)
        return kind

    def documents(self, extent: Extent, kind: str) -> Iterator[dict[str, str | int]]:
        """Yield the documents of an extent whose rows are of this kind; long text in pieces."""
        for location, row in self.rows(extent):
            yield from in_pieces(document(_object(location, row), kind, location))


def _object(location: str, row: object) -> Mapping[str, object]:
    if not isinstance(row, Mapping):
        raise UserError(f'{location} is not an object: each row is {{"text": "..."}} or {{"messages": [...]}}')
    return row


def require_distinct(names: Sequence[str], file: str) -> None:
    """Raise UserError for two columns of one name: csv and Arrow would silently keep the last."""
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file} has two columns `{twice}`: rename one")
