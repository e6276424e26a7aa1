"""Tables of other packages as data sets: a frame of pandas or polars, a table of pyarrow. Their `[0]` is a column."""

from __future__ import annotations

from typing import Any

TABLES = frozenset([("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table")])
"""Package and class of each."""


def as_dataset(data: Any) -> Any:
    """Return a table as a `datasets.Dataset` of its rows, anything else as it is."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__} & TABLES
    if not kinds:
        return data
    from datasets import Dataset

    match min(kinds):
        case ("pandas", _):
            return Dataset.from_pandas(data, preserve_index=False)
        case ("polars", _):
            return Dataset.from_polars(data)
    return Dataset(data)
