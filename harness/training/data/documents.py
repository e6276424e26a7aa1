"""A user's own data set of text or conversations as documents, checked row by row like a file's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.training.data.cache import fingerprint
from harness.training.data.rows import COLUMNS, document, kind_of_row

if TYPE_CHECKING:
    from datasets import Dataset


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
    names = list(document(dataset[0], kind, f"{name}[0]"))
    features = Features({column: Value("large_string") for column in names})
    if isinstance(dataset, Dataset):
        return dataset.with_format(None).map(
            lambda row, i: document(row, kind, f"{name}[{i}]"),
            with_indices=True,
            remove_columns=dataset.column_names,
            features=features,
            new_fingerprint=fingerprint("documents", dataset._fingerprint, kind, name),
            desc=f"Reading {name}",
        )
    rows = [document(dataset[i], kind, f"{name}[{i}]") for i in range(len(dataset))]
    columns = {column: [row[column] for row in rows] for column in names}
    table = Dataset.from_dict(columns, features=features)
    table._fingerprint = fingerprint(*(text for texts in columns.values() for text in texts))
    return table
