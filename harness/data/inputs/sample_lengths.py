"""Samples of token ids that are longer than the model has positions, found before a run begins where that is cheap.

It is for a list of dicts, and for a `datasets.Dataset`, which stores how long each row is. Others, and packed samples,
whose position ids count, are looked at as they are read (`batches/tokens_only.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from harness.data.batches.collate import MapDataset
from harness.data.batches.tokens_only import tokens_of, too_long

if TYPE_CHECKING:
    from datasets import Dataset


def require_short(dataset: MapDataset, limit: int) -> None:
    """Raise UserError for a sample of more than `limit` tokens, where lengths are known without reading the samples."""
    if isinstance(dataset, list | tuple):
        lengths = np.array([0 if _is_packed(sample) else tokens_of(sample) or 0 for sample in dataset])
    elif type(dataset).__module__ == "datasets.arrow_dataset":  # not imported for those who do not use it
        lengths = _stored_lengths(cast("Dataset", dataset))
    else:
        return
    for row in np.flatnonzero(lengths > limit)[:1].tolist():
        # a row of a table that was shuffled or selected from may be another sample, or none
        if row < len(dataset) and (tokens_of(dataset[row]) or 0) > limit:
            raise too_long(row, int(lengths[row]), limit)


def _is_packed(sample: object) -> bool:
    return isinstance(sample, Mapping) and "position_ids" in sample


def _stored_lengths(dataset: Dataset) -> npt.NDArray[np.integer]:
    """Return the lengths of the rows of a table of input_ids; none where position_ids count."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = dataset.data.column("input_ids") if "input_ids" in dataset.data.column_names else None
    is_list = column is not None and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type))
    if not is_list or "position_ids" in dataset.column_names:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0))
