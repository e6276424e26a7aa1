"""Documents -> blocks: every document closed by the end-of-document id, all joined, cut into blocks of N ids.

As in HF's run_clm.py a block is its own labels (the loss shifts them: N-1 predictions a block), but the
corpus is joined as a whole: exactly floor(total / N) blocks, whatever the size of a batch on the way. Packed
blocks hold the same ids, and position ids that begin again at 0 with each document and each block: attention
stays within a document. The ids are kept on disk (`tokens.py`) and mapped from there, so ranks of a host share the
pages; blocks of any size are cut out of the same ids when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.data.files.token_files import open_tokens
from harness.data.on_disk.cache import USUAL, Preparation, fingerprint_of, identity
from harness.data.on_disk.shards import make_shards
from harness.data.pieces import PieceEncoder
from harness.data.tokenizer import Tokenizer, largest_id
from harness.data.tokens import Corpus, TokenIds
from harness.errors import UserError
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache key: raise it when the same documents give other ids.
_FORMAT = 4


class Blocks:
    """A map-style data set of dicts `input_ids` and, if packed, `position_ids`: int64 of `block_size`."""

    def __init__(self, ids: TokenIds, block_size: int, *, packing: bool) -> None:
        self.ids = ids
        self.block_size = block_size
        self.packing = packing

    def __len__(self) -> int:
        return len(self.ids) // self.block_size

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the tokens of these blocks, by default of all: each is full."""
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
    """Return the position ids of a block in which documents begin at `starts`."""
    begins = np.zeros(block_size, dtype=np.int64)
    begins[starts] = starts
    return np.arange(block_size) - np.maximum.accumulate(begins)


def make_blocks(
    documents: Dataset, tokenizer: Tokenizer, block_size: int, how: Preparation = USUAL, *, packing: bool = False
) -> Blocks:
    """Return the documents' ids in blocks of `block_size`; with `packing` also position ids.

    What does not fill the last block is dropped. The ids are kept under a name made from documents and tokenizer: a
    second call encodes nothing, and one after an interruption what is missing. Raises UserError if `block_size` < 2,
    the documents do not fill one block, or the cache cannot be written.
    """
    require_block_size(block_size)
    dtype = smallest_dtype(largest_id(tokenizer))
    folder = how.folder(_FORMAT, fingerprint_of(documents), identity(tokenizer))
    try:
        corpus = Corpus.of(documents, PieceEncoder(tokenizer), dtype)
        folders = make_shards(
            folder, corpus.shards(), corpus.write, doing="tokenising", say=how.say, workers=how.workers
        )
        ids = TokenIds.of_shards(folders, dtype)
    except OSError as error:
        raise how.error(error) from error
    return blocks_of(ids, block_size, packing=packing)


def blocks_of(ids: TokenIds, block_size: int, *, packing: bool) -> Blocks:
    """Return ids in blocks. UserError if they do not fill one."""
    require_block_size(block_size)
    if len(ids) < block_size:
        total = counted(len(ids), "token")
        raise UserError(f"the text makes {total}, less than one block of {block_size}: lower --block_size")
    return Blocks(ids, block_size, packing=packing)


def token_blocks(paths: Sequence[Path], block_size: int, vocabulary: int, *, packing: bool) -> Blocks:
    """Return the ids of token files in blocks, mapped from there. UserError if one cannot be used.

    With `packing` documents are kept apart, so each file has to say where they begin.
    """
    files = [open_tokens(path, vocabulary) for path in paths]
    for file in files:
        if packing and not len(file.starts):
            raise UserError(f"{file.path} does not say where its documents begin: remove --packing")
    return blocks_of(TokenIds([f.ids for f in files], [f.starts for f in files]), block_size, packing=packing)


def require_block_size(block_size: int) -> None:
    """Raise UserError for a block that predicts nothing."""
    if block_size < 2:
        raise UserError(f"--block_size {block_size}: use at least 2: shorter blocks have nothing to predict")


def smallest_dtype(largest: int) -> np.dtype[np.integer]:
    """Return the dtype that ids or positions up to `largest` are kept in."""
    return np.dtype(np.uint16 if largest < 2**16 else np.int32)
