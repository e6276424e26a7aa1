"""A user's own data set of text or conversations as documents, checked row by row like a file's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.training.data.cache import fingerprint
from harness.training.data.pieces import in_pieces
from harness.training.data.rows import COLUMNS, document, kind_of_row

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_AT_ONCE = 256


def holds_tokens(dataset: Any) -> bool:
    """Whether there is nothing to prepare: no data set, one of input_ids or of pairs, or none of the known columns."""
    if dataset is None or not hasattr(dataset, "__getitem__") or not len(dataset):
        return True
    row = dataset[0]
    if not isinstance(row, Mapping) or "input_ids" in row:
        return True
    return not any(set(needed) <= set(row) for needed in COLUMNS.values())


def as_documents(dataset: Any, name: str) -> Dataset:
    """The documents of a map-style data set whose items are dicts; UserError with `name[i]` for one that is none.

    Those of a `datasets.Dataset` are kept on disk beside its own files, others in memory.
    """
    from datasets import Dataset, Features, Value

    kind = kind_of_row(dataset[0], f"{name}[0]")
    names = list(next(in_pieces(document(dataset[0], kind, f"{name}[0]"))))
    features = Features({column: Value("int32" if column == "part" else "large_string") for column in names})

    def rows(values: Iterable[Mapping[str, Any]], numbers: Iterable[int]) -> dict[str, list[Any]]:
        made = [
            piece
            for row, i in zip(values, numbers, strict=True)
            for piece in in_pieces(document(row, kind, f"{name}[{i}]"))
        ]
        return {column: [row[column] for row in made] for column in names}

    if isinstance(dataset, Dataset):
        return dataset.with_format(None).map(
            lambda batch, numbers: rows(_rows_of(batch), numbers),
            with_indices=True,
            batched=True,
            batch_size=_ROWS_AT_ONCE,
            writer_batch_size=_ROWS_AT_ONCE,
            remove_columns=dataset.column_names,
            features=features,
            new_fingerprint=fingerprint("documents", 2, dataset._fingerprint, kind, name),
            desc=f"Reading {name}",
        )
    columns = rows((dataset[i] for i in range(len(dataset))), range(len(dataset)))
    table = Dataset.from_dict(columns, features=features)
    table._fingerprint = fingerprint(*(value for values in columns.values() for value in values))
    return table


def _rows_of(batch: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
