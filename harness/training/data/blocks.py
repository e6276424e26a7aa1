"""Documents -> blocks: every document closed by the end-of-document id, all joined, cut into blocks of N ids.

As in HF's run_clm.py a block is its own labels (the loss shifts them: N-1 predictions a block), but the
corpus is joined as a whole: exactly floor(total / N) blocks, whatever the size of a batch on the way. Packed
blocks hold the same ids, and position ids that begin again at 0 with each document and each block: attention
stays within a document. Blocks are kept on disk and mapped from there, so ranks of a host share the pages.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.config.errors import UserError
from harness.config.wording import counted
from harness.training.data.cache import fingerprint, identity, map_once
from harness.training.data.tokenizer import Tokenizer, encode_documents, largest_id

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

# Part of the cache key: raise it when the same documents give other blocks.
_FORMAT = 1


def make_blocks(
    documents: Dataset,
    tokenizer: Tokenizer,
    block_size: int,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    packing: bool = False,
) -> Dataset:
    """The documents' ids in blocks of `block_size`: a `datasets.Dataset` of `input_ids`, int64 tensors.

    With `packing` also `position_ids`. What does not fill the last block is dropped. The result is kept in
    `cache_dir` (default HF_DATASETS_CACHE) under a name made from documents, tokenizer and block size, and a second
    call maps nothing. Raises UserError if `block_size` < 2, the documents do not fill one block, or the cache cannot
    be written.
    """
    from datasets import Features, List, Value

    require_block_size(block_size)
    joiner = BlockJoiner(tokenizer, block_size, packing)
    blocks = map_once(
        documents,
        joiner,
        Features({name: List(Value(dtype.name), length=block_size) for name, dtype in joiner.columns.items()}),
        fingerprint(_FORMAT, documents._fingerprint, block_size, packing, identity(tokenizer)),
        cache_dir=cache_dir,
        said=f"Cutting text into blocks of {block_size}",
    )
    if not len(blocks):
        total = counted(sum(map(len, encode_documents(tokenizer, documents["text"]))), "token")
        raise UserError(f"the text makes {total}, less than one block of {block_size}: lower --block_size")
    return blocks.with_format("torch")


def require_block_size(block_size: int) -> None:
    """UserError for a block that predicts nothing."""
    if block_size < 2:
        raise UserError(f"--block_size {block_size}: a block of fewer than 2 tokens predicts nothing")


class BlockJoiner:
    """Cuts batches of documents into blocks; what is left of one batch opens the next one's first block.

    It holds at most `block_size` - 1 ids between calls, and must see the batches in order, in one process.

    Attributes:
        columns: name -> dtype of what a block holds.
    """

    def __init__(self, tokenizer: Tokenizer, block_size: int, packing: bool = False) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.columns = {"input_ids": smallest_dtype(largest_id(tokenizer))}
        if packing:
            self.columns["position_ids"] = smallest_dtype(block_size)
        self.rest = np.empty((len(self.columns), 0), dtype=np.int64)

    def cut(self, texts: list[str]) -> npt.NDArray[np.integer]:
        """The blocks, [columns, n, block_size], that end within these documents."""
        documents = encode_documents(self.tokenizer, texts)
        rows = [np.concatenate([self.rest[0], *documents])]
        if len(self.columns) > 1:
            rows.append(np.concatenate([self.rest[1], *(np.arange(len(ids)) for ids in documents)]))
        joined = np.stack(rows)
        whole = joined.shape[1] // self.block_size * self.block_size
        self.rest = joined[:, whole:].copy()
        blocks = joined[:, :whole].reshape(len(joined), -1, self.block_size)
        if len(blocks) > 1:
            blocks[1] = _from_block_start(blocks[1])
        return blocks

    def __call__(self, batch: dict[str, list[str]]) -> pa.Table:
        import pyarrow as pa

        return pa.table(
            {
                name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1).astype(dtype)), self.block_size)
                for (name, dtype), values in zip(self.columns.items(), self.cut(batch["text"]), strict=True)
            }
        )


def smallest_dtype(largest: int) -> np.dtype[np.integer]:
    """The dtype that ids or positions up to `largest` are kept in."""
    return np.dtype(np.uint16 if largest < 2**16 else np.int32)


def _from_block_start(positions: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Positions in blocks [n, block_size] whose first document, begun in an earlier block, counts from 0 as well."""
    continued = np.cumsum(positions == 0, axis=1) == 0
    return np.where(continued, positions - positions[:, :1], positions)
