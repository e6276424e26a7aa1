"""A user's own data set of text or conversations as documents, checked row by row like a file's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from harness.data.batches.collate import MapDataset
from harness.data.files.copies import copied
from harness.data.files.rows import COLUMNS, document, kind_of_row, plain_row
from harness.data.on_disk.cache import (
    cache_error,
    fingerprint,
    fingerprint_of,
    prepared_folder,
    set_fingerprint,
)
from harness.data.on_disk.shards import shard_bytes
from harness.data.pieces import in_pieces
from harness.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache key: raise it when the documents made from the same rows change.
_FORMAT = 4

_ROWS_AT_ONCE = 64


def holds_tokens(dataset: MapDataset | None) -> bool:
    """Whether there is nothing to prepare: no data set, one of input_ids or of pairs, or none of the known columns."""
    if dataset is None or not hasattr(dataset, "__getitem__") or not len(dataset):
        return True
    row = dataset[0]
    if not isinstance(row, Mapping) or "input_ids" in row:
        return True
    return not any(set(needed) <= set(row) for needed in COLUMNS.values())


def as_documents(dataset: MapDataset, name: str, say: Callable[[str], None] = lambda _: None) -> Dataset:
    """Return the documents of a map-style data set whose items are dicts; UserError with `name[i]` for one that is
    none.

    Those of a `datasets.Dataset` on disk are kept on disk, in HF_DATASETS_CACHE, others in memory.
    """
    from datasets import Dataset, Features, Value

    kind = kind_of_row(dataset[0], f"{name}[0]")
    names = list(next(in_pieces(document(plain_row(dataset[0]), kind, f"{name}[0]"))))
    features = Features({column: Value("int32" if column == "part" else "large_string") for column in names})

    def documents(rows: Iterable[tuple[int, Mapping[str, object]]]) -> Iterator[dict[str, str | int]]:
        for number, row in rows:
            if not isinstance(row, Mapping):
                raise UserError(f"{name}[{number}] is {type(row).__name__}, unlike earlier rows: give dicts alone")
            yield from in_pieces(document(plain_row(row), kind, f"{name}[{number}]"))

    if isinstance(dataset, Dataset) and dataset.cache_files:
        folder = prepared_folder(None) / fingerprint("documents", _FORMAT, fingerprint_of(dataset), kind, name)
        plain = dataset.with_format(None)
        try:
            return copied(folder, _ranges(plain), lambda rows: documents(_rows(plain, rows)), features, say=say)
        except OSError as error:
            raise cache_error(error, None) from error
    made = list(documents((i, dataset[i]) for i in range(len(dataset))))
    table = Dataset.from_list(made, features=features)
    set_fingerprint(table, fingerprint(*(value for row in made for value in row.values())))
    return table


def _ranges(dataset: Dataset) -> list[range]:
    """Rows in runs of about one size on disk: a function of the data set alone."""
    total = dataset.data.nbytes
    rows = max(len(dataset) * shard_bytes(total) // max(total, 1), 1)
    return [range(start, min(start + rows, len(dataset))) for start in range(0, len(dataset), rows)]


def _rows(dataset: Dataset, rows: range) -> Iterator[tuple[int, dict[str, object]]]:
    for start in range(rows.start, rows.stop, _ROWS_AT_ONCE):
        batch = dataset[start : min(start + _ROWS_AT_ONCE, rows.stop)]
        for number, values in enumerate(zip(*batch.values(), strict=True), start):
            yield number, dict(zip(batch, values, strict=True))
