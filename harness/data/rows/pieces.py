"""Split a long document into rows of at most `PIECE_CHARACTERS`, numbered in the column `part`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from datasets import Dataset

PIECE_CHARACTERS = 1 << 16


def in_pieces(document: dict[str, str]) -> Iterator[dict[str, str | int]]:
    """Yield a text document as rows numbered by `part`; yield a conversation, which is short, unchanged."""
    if "text" not in document:
        yield dict(document)
        return
    text = document["text"]
    for part, start in enumerate(range(0, max(len(text), 1), PIECE_CHARACTERS)):
        yield {"text": text[start : start + PIECE_CHARACTERS], "part": part}


def parts_of(documents: Dataset) -> npt.NDArray[np.int32]:
    """Return the part number of each row in its document [rows]; 0 without that column: rows are whole documents."""
    if "part" not in documents.column_names:
        return np.zeros(len(documents), dtype=np.int32)
    return np.asarray(documents.select_columns("part").with_format("numpy")[:]["part"], dtype=np.int32)
