"""Tokenise text to disk, join all documents, each closed by an end-of-document id, and cut the ids into blocks.

As in HF's run_clm.py a document has the special tokens that the tokenizer adds (BOS), and the labels of a block are its
ids (the loss shifts them: N-1 predictions a block). Unlike there, the whole corpus is joined, not each batch of 1,000
documents: this gives floor(total / N) blocks. Packed blocks have the same ids, and also position ids that restart at 0
with each document and each block, so that attention stays within a document.

A shard holds consecutive documents in two files: `ids`, all token ids joined, and `starts`, the indices in `ids` where
documents begin. Blocks of any size are cut from the same `ids` when they are read. So another --block_size needs no
new tokenising, and the ranks of a host share the mapped pages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.data.files.token_files import open_tokens
from harness.data.on_disk.cache import USUAL, Preparation, fingerprint_of
from harness.data.on_disk.shards import batches, bytes_of_rows, make_shards, mapped, rows_of_shards
from harness.data.piece_encoder import PieceEncoder
from harness.data.rows.pieces import parts_of
from harness.data.tokenizer import Tokenizer, identity, largest_id
from harness.errors import UserError
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset


# Part of the cache key. Increase it when a code change gives other ids for the same documents.
_FORMAT = 5


class TokenIds:
    """The ids of several arrays as one sequence, and where documents begin in it.

    Args:
        ids: the arrays [tokens], none of them empty.
        starts: for each array the indices in it where documents begin, ascending.
    """

    def __init__(self, ids: Sequence[npt.NDArray[np.integer]], starts: Sequence[npt.NDArray[np.int64]]) -> None:
        self._ids = ids
        self._starts = starts
        self._ends = np.cumsum([len(part) for part in ids], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return ids `start` to `stop` - 1, int64 [stop - start]."""
        parts = [self._ids[shard][first:last] for shard, first, last in self._overlaps(start, stop)]
        return np.concatenate(parts, dtype=np.int64, casting="safe")

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the indices of ids that begin a document between `start` and `stop`, counted from `start`."""
        found = [np.empty(0, dtype=np.int64)]
        for shard, first, last in self._overlaps(start, stop):
            starts = self._starts[shard]
            offset = self._ends[shard] - len(self._ids[shard]) - start
            found.append(starts[np.searchsorted(starts, first) : np.searchsorted(starts, last)] + offset)
        return np.concatenate(found)

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (array, first, last + 1 within it) for each array that holds some of the ids `start` to `stop` - 1."""
        shard = bisect_right(self._ends, start)
        while start < stop:
            begins = self._ends[shard] - len(self._ids[shard])
            last = min(stop, self._ends[shard])
            yield shard, start - begins, last - begins
            start = last
            shard += 1


class Blocks:
    """A map-style data set of dicts `input_ids` and, if packed, `position_ids`: int64 [block_size]."""

    def __init__(self, ids: TokenIds, block_size: int, *, packing: bool) -> None:
        self.ids = ids
        self.block_size = block_size
        self.packing = packing

    def __len__(self) -> int:
        return len(self.ids) // self.block_size

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the number of tokens of these blocks, by default of all: each is full."""
        return np.full(len(self) if rows is None else np.asarray(rows).size, self.block_size)

    def padded_to(self, _length: int) -> Blocks:
        """Return these blocks: they are never padded."""
        return self

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.block_size
        stop = start + self.block_size
        block = {"input_ids": torch.from_numpy(self.ids.ids(start, stop))}
        if self.packing:
            block["position_ids"] = torch.from_numpy(positions_of(self.ids.starts(start, stop), self.block_size))
        return block


def positions_of(starts: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Return the position ids [block_size] of a block in which documents begin at `starts`: 0, 1, ... in each."""
    # The running maximum of `begins` is, for each place, the last start at or before it.
    begins = np.zeros(block_size, dtype=np.int64)
    begins[starts] = starts
    return np.arange(block_size) - np.maximum.accumulate(begins)


def make_blocks(
    documents: Dataset, tokenizer: Tokenizer, block_size: int, how: Preparation = USUAL, *, packing: bool = False
) -> Blocks:
    """Tokenise documents (`text`, perhaps `part`) and cut them into blocks; with `packing` add position ids.

    Ids that do not fill the last block are dropped. The ids are cached under a hash of documents and tokenizer: a
    second call tokenises nothing, and a call after an interruption only the missing shards. Each process needs memory
    for a few MB of text, however long a document is.

    Raises:
        UserError: `block_size` < 2, the documents do not fill one block, or the cache cannot be written.
    """
    require_block_size(block_size)
    encode = PieceEncoder(tokenizer)
    dtype = smallest_dtype(largest_id(tokenizer))
    # from Arrow's offsets, without the text
    lengths = bytes_of_rows(documents, "text")
    parts = parts_of(documents)

    def encoded(first: int, stop: int) -> Iterator[npt.NDArray[np.integer]]:
        for start, end in batches(lengths, first, stop):
            # If a document continues across the end of a batch or shard, the encoder looks at the neighbouring row
            # to cut it where the tokenizer does (piece_encoder.py).
            before = documents[start - 1]["text"] if parts[start] > 0 else ""
            continued = end < len(parts) and parts[end] > 0
            after = documents[end]["text"] if continued else None
            yield from encode(documents[start:end]["text"], parts[start:end].tolist(), before, after)

    def write(folder: Path, rows: tuple[int, int]) -> None:
        starts = array("q")
        count = 0
        with (folder / "ids").open("wb") as file:
            for ids, part in zip(encoded(*rows), parts[slice(*rows)], strict=True):
                if part == 0:
                    starts.append(count)
                ids.astype(dtype).tofile(file)
                count += len(ids)
        np.asarray(starts, dtype=np.int64).tofile(folder / "starts")

    try:
        folders = make_shards(
            how.folder(_FORMAT, fingerprint_of(documents), identity(tokenizer)),
            rows_of_shards(lengths),
            write,
            doing="tokenising",
            say=how.say,
            workers=how.workers,
        )
        filled = [folder for folder in folders if (folder / "ids").stat().st_size]
        ids = TokenIds([mapped(f / "ids", dtype) for f in filled], [mapped(f / "starts", np.int64) for f in filled])
    except OSError as error:
        raise how.error(error) from error
    return blocks_of(ids, block_size, packing=packing)


def blocks_of(ids: TokenIds, block_size: int, *, packing: bool) -> Blocks:
    """Return ids in blocks of `block_size` tokens. UserError if they do not fill one."""
    require_block_size(block_size)
    if len(ids) < block_size:
        total = counted(len(ids), "token")
        raise UserError(f"the text makes {total}, less than one block of {block_size}: lower --block_size")
    return Blocks(ids, block_size, packing=packing)


def token_blocks(paths: Sequence[Path], block_size: int, vocabulary: int, *, packing: bool) -> Blocks:
    """Map token files and cut their ids into blocks. UserError for a file that cannot be used.

    `packing` needs the start of each document, so each file must have an index.
    """
    files = [open_tokens(path, vocabulary) for path in paths]
    for file in files:
        if packing and not len(file.starts):
            raise UserError(f"{file.path} does not say where its documents begin: remove --packing")
    return blocks_of(TokenIds([f.ids for f in files], [f.starts for f in files]), block_size, packing=packing)


def require_block_size(block_size: int) -> None:
    """Raise UserError for a block too short to predict a token."""
    if block_size < 2:
        raise UserError(f"--block_size {block_size}: use at least 2: shorter blocks have nothing to predict")


def smallest_dtype(largest: int) -> np.dtype[np.integer]:
    """Return uint16 for ids up to 65,535, else int32."""
    return np.dtype(np.uint16 if largest < 2**16 else np.int32)
