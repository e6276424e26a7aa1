"""Conversations -> token ids on disk, in the shards of `shards.py`, each conversation cut to the length of a sample.

A shard is a run of conversations. It holds `ids` and `answers` (whether an id is learnt), all conversations one after
the other, `ends`, where each of them ends, and `lost`, how many ids were cut off its end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.data.chat import ConversationEncoder, Encoded
from harness.data.on_disk.mapping import mapped
from harness.data.on_disk.shards import batches, bytes_of_rows, rows_of_shards

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations that become shards.

    Attributes:
        documents: with columns `conversation` and `place`.
        encoder: makes ids of one.
        longest: ids that are kept of each; one of which no answer is left is dropped.
        dtype: of the ids on disk.
        lengths: bytes of each conversation.
    """

    documents: Dataset
    encoder: ConversationEncoder
    longest: int
    dtype: np.dtype[np.integer]
    lengths: npt.NDArray[np.integer]

    @classmethod
    def of(
        cls, documents: Dataset, encoder: ConversationEncoder, longest: int, dtype: np.dtype[np.integer]
    ) -> Conversations:
        """Measure the conversations; they are not read."""
        lengths = bytes_of_rows(documents, "conversation")
        return cls(documents=documents, encoder=encoder, longest=longest, dtype=dtype, lengths=lengths)

    def shards(self) -> list[tuple[int, int]]:
        """Return the first and the last row + 1 of each shard."""
        return rows_of_shards(self.lengths)

    def write(self, folder: Path, rows: tuple[int, int]) -> None:
        """Encode these rows, the first and the last + 1, into `folder`."""
        ends, lost, learnt = array("q"), array("q"), 0
        with (folder / "ids").open("wb") as ids, (folder / "answers").open("wb") as answers:
            for start, stop in batches(self.lengths, *rows):
                batch = self.documents[start:stop]
                for conversation, place in zip(batch["conversation"], batch["place"], strict=True):
                    encoded = self.encoder(conversation, place)
                    kept = encoded.answers[: self.longest]
                    if not kept[1:].any():  # the first token is never predicted
                        continue
                    encoded.ids[: self.longest].astype(self.dtype).tofile(ids)
                    kept.tofile(answers)
                    ends.append((ends[-1] if ends else 0) + len(kept))
                    lost.append(len(encoded.ids) - len(kept))
                    learnt += int(np.count_nonzero(kept[1:]))
        np.asarray(ends, dtype=np.int64).tofile(folder / "ends")
        np.asarray(lost, dtype=np.int64).tofile(folder / "lost")
        np.asarray([learnt], dtype=np.int64).tofile(folder / "learnt")


class EncodedConversations:
    """The conversations of all shards, mapped from there: `[i]` is read when it is asked for."""

    def __init__(self, folders: list[Path], dtype: np.dtype[np.integer]) -> None:
        folders = [folder for folder in folders if (folder / "ids").stat().st_size]
        self._ids = [mapped(folder / "ids", dtype) for folder in folders]
        self._answers = [mapped(folder / "answers", np.bool_) for folder in folders]
        self._ends = [mapped(folder / "ends", np.int64) for folder in folders]
        self._lost = [mapped(folder / "lost", np.int64) for folder in folders]
        self._learnt = sum(int(np.fromfile(folder / "learnt", dtype=np.int64)[0]) for folder in folders)
        self._last = np.cumsum([len(ends) for ends in self._ends], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._last[-1] if self._last else 0

    def __getitem__(self, index: int) -> Encoded:
        shard = bisect_right(self._last, index)
        ends = self._ends[shard]
        row = index - (self._last[shard] - len(ends))
        span = slice(ends[row - 1] if row else 0, ends[row])
        return Encoded(ids=self._ids[shard][span].astype(np.int64), answers=np.asarray(self._answers[shard][span]))

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.int32]:
        """Return how many ids each of these conversations has, by default of all."""
        if rows is None:
            return np.concatenate([np.diff(ends, prepend=0).astype(np.int32) for ends in self._ends])
        asked = np.asarray(rows)
        shards = np.searchsorted(self._last, asked, side="right")
        found = np.empty(len(asked), dtype=np.int32)
        for shard in np.unique(shards):
            here, ends = shards == shard, self._ends[shard]
            row = asked[here] - (self._last[shard] - len(ends))
            found[here] = ends[row] - np.where(row > 0, ends[row - 1], 0)
        return found

    def tokens(self) -> int:
        """Return how many ids all conversations have."""
        return sum(map(len, self._ids))

    def learnt(self) -> int:
        """Return how many of them are learnt."""
        return self._learnt

    def lost(self) -> tuple[int, int]:
        """Return how many conversations were cut, and how many ids they lost."""
        return sum(int(np.count_nonzero(lost)) for lost in self._lost), sum(int(lost.sum()) for lost in self._lost)
