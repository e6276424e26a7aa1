"""Parquet files: their schema, their row groups and their rows; whatever is damaged is one UserError."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Schema:
    """What a file says of itself: its columns, and rows and bytes of each row group."""

    columns: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]


def parquet_schema(file: Path) -> Schema:
    """Return what a file says of itself."""
    with _opened(file, "is not a parquet file") as table:
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        return Schema(tuple(table.schema_arrow.names), tuple((each.num_rows, each.total_byte_size) for each in groups))


def parquet_rows(
    file: Path, groups: Sequence[int], columns: Sequence[str], before: int
) -> Iterator[tuple[int, dict[str, object]]]:
    """Give number and content of the rows of these row groups, in batches; `before`: rows of the file before them."""
    number = before
    with _opened(file, "is damaged") as table:
        batches = iter(table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=list(groups), columns=list(columns)))
        while True:
            with _told(file, f"is damaged after row {number}"):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for row in rows:
                number += 1
                yield number, row


@contextmanager
def _opened(file: Path, wrong: str) -> Iterator[ParquetFile]:
    from pyarrow.parquet import ParquetFile

    with _told(file, wrong):
        table = ParquetFile(file, page_checksum_verification=True)
    with table:
        yield table


@contextmanager
def _told(file: Path, wrong: str) -> Iterator[None]:
    """Raise UserError for what pyarrow raises; OSError of the disk alone."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; Arrow's own have no number
            raise
        raise UserError(f"{file} {wrong}: {' '.join(str(error).split()) or type(error).__name__}") from error
