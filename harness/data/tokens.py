"""Text -> token ids on disk, in the shards of `shards.py`, and the ids of all shards as one run.

A shard is a run of rows of documents. It holds `ids`, all ids one after the other, and `starts`, the places among
them where documents begin. Each process takes memory for some MB of text, however long a document is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.data.on_disk.mapping import mapped
from harness.data.on_disk.shards import batches, bytes_of_rows, rows_of_shards
from harness.data.pieces import PieceEncoder, parts_of

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents that become shards.

    Attributes:
        documents: with columns `text` and perhaps `part`.
        encoder: makes ids of their rows.
        dtype: of the ids on disk.
        lengths: bytes of each row's text.
        parts: which part of its document each row is.
    """

    documents: Dataset
    encoder: PieceEncoder
    dtype: np.dtype[np.integer]
    lengths: npt.NDArray[np.integer]
    parts: npt.NDArray[np.integer]

    @classmethod
    def of(cls, documents: Dataset, encoder: PieceEncoder, dtype: np.dtype[np.integer]) -> Corpus:
        """Measure the rows; their text is not read."""
        lengths, parts = bytes_of_rows(documents, "text"), parts_of(documents)
        return cls(documents=documents, encoder=encoder, dtype=dtype, lengths=lengths, parts=parts)

    def shards(self) -> list[tuple[int, int]]:
        """Return the first and the last row + 1 of each shard."""
        return rows_of_shards(self.lengths)

    def write(self, folder: Path, rows: tuple[int, int]) -> None:
        """Encode these rows, the first and the last + 1, into `folder`."""
        first, stop = rows
        starts: list[int] = []
        count = 0
        with (folder / "ids").open("wb") as file:
            for ids, part in zip(self._encoded(first, stop), self.parts[first:stop], strict=True):
                if part == 0:
                    starts.append(count)
                ids.astype(self.dtype).tofile(file)
                count += len(ids)
        np.asarray(starts, dtype=np.int64).tofile(folder / "starts")

    def _encoded(self, first: int, stop: int) -> Iterator[npt.NDArray[np.integer]]:
        for start, end in batches(self.lengths, first, stop):
            rows = self.documents[start:end]["text"]
            before = self.documents[start - 1]["text"] if self.parts[start] > 0 else ""
            continued = end < len(self.parts) and self.parts[end] > 0
            after = self.documents[end]["text"] if continued else None
            yield from self.encoder(rows, self.parts[start:end].tolist(), before, after)


class TokenIds:
    """All ids of several arrays, one after the other, and where documents begin in each of them."""

    def __init__(self, ids: Sequence[npt.NDArray[np.integer]], starts: Sequence[npt.NDArray[np.int64]]) -> None:
        self._ids, self._starts = ids, starts
        self._ends = np.cumsum([len(part) for part in ids], dtype=np.int64).tolist()

    @classmethod
    def of_shards(cls, folders: list[Path], dtype: np.dtype[np.integer]) -> TokenIds:
        """Map a corpus from its shards."""
        filled = [folder for folder in folders if (folder / "ids").stat().st_size]
        ids = [mapped(folder / "ids", dtype) for folder in filled]
        return cls(ids, [mapped(folder / "starts", np.int64) for folder in filled])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return ids `start` to `stop` - 1."""
        parts = [self._ids[shard][first:last] for shard, first, last in self._overlaps(start, stop)]
        return np.concatenate(parts, dtype=np.int64, casting="safe")

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return which of these ids begin a document, counted from `start`."""
        found = [np.empty(0, dtype=np.int64)]
        for shard, first, last in self._overlaps(start, stop):
            starts = self._starts[shard]
            offset = self._ends[shard] - len(self._ids[shard]) - start
            found.append(starts[np.searchsorted(starts, first) : np.searchsorted(starts, last)] + offset)
        return np.concatenate(found)

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards that hold ids `start` to `stop` - 1, each with the first and the last + 1 of its own."""
        shard = bisect_right(self._ends, start)
        while start < stop:
            begins = self._ends[shard] - len(self._ids[shard])
            last = min(stop, self._ends[shard])
            yield shard, start - begins, last - begins
            start, shard = last, shard + 1
