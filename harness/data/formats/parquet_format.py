"""A .parquet file: its extents are row groups, and only the columns that are used are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.data.formats.format import Extent, Row, RowFormat, require_distinct
from harness.data.rows.kinds import BESIDE, COLUMNS, kind_of_row, plain_row
from harness.errors import UserError, text_of

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_ROWS_AT_ONCE = 64  # rows in memory


class ParquetFormat(RowFormat):
    """Rows of an Arrow table. The schema names the columns, so no row is read to find their kind."""

    suffix = ".parquet"

    def kind(self, file: Path) -> str | None:
        """Return the kind of the rows by the names of the columns; None without any row."""
        schema = _schema(file)
        require_distinct(schema.columns, str(file))
        kind = kind_of_row(schema.columns, str(file))
        return kind if any(rows for rows, _ in schema.groups) else None

    def whole(self, file: Path) -> Extent:
        """Return all row groups as one extent."""
        return Extent(str(file), 0, len(_schema(file).groups))

    def extents(self, file: Path, size: int) -> Iterator[Extent]:  # noqa: ARG002
        """Yield each row group as an extent, whatever its size."""
        before = 0
        for index, (rows, size_of_group) in enumerate(_schema(file).groups):
            yield Extent(str(file), index, index + 1, before, size_of_group)
            before += rows

    def in_order(self, file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:  # noqa: ARG002
        """Return the row groups from number `start` on."""
        return itertools.islice(self.extents(file, 0), start, None)

    def rows(self, extent: Extent) -> Iterator[Row]:
        """Yield the rows of the extent's row groups; read only the columns that are used, a few rows at a time."""
        names = _schema(Path(extent.file)).columns
        kind = kind_of_row(names, extent.file)
        return self._rows(extent, [name for name in (*COLUMNS[kind], *BESIDE[kind]) if name in names])

    def whole_rows(self, extent: Extent) -> Iterator[Row]:
        """Yield the rows of the extent's row groups with all columns, a few rows at a time."""
        names = _schema(Path(extent.file)).columns
        require_distinct(names, extent.file)
        return self._rows(extent, names)

    def _rows(self, extent: Extent, columns: Sequence[str]) -> Iterator[Row]:
        file = Path(extent.file)
        number = extent.before
        with _opened(file, "is damaged") as table:
            groups = list(range(extent.start, extent.stop))
            batches = iter(table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups, columns=list(columns)))
            while True:
                with _arrow_errors(file, f"is damaged after row {number}"):
                    batch = next(batches, None)
                    rows = [] if batch is None else batch.to_pylist()
                if batch is None:
                    return
                for row in rows:
                    number += 1
                    yield f"{file}, row {number}", plain_row(row)


FORMAT = ParquetFormat()


@dataclass(frozen=True)
class ParquetSchema:
    """The column names of a parquet file, and (rows, bytes) of each of its row groups."""

    columns: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]


def _schema(file: Path) -> ParquetSchema:
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
        raise UserError(f"{file} {wrong}: {text_of(error)}") from error
