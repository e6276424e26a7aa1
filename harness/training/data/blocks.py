"""Documents -> blocks: every document closed by the end-of-document id, all joined, cut into blocks of N ids.

As in HF's run_clm.py a block is its own labels (the loss shifts them: N-1 predictions a block), but the
corpus is joined as a whole: exactly floor(total / N) blocks, whatever the size of a batch on the way. Blocks
are kept on disk and mapped from there, so ranks of a host share the pages.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from harness.config.errors import UserError
from harness.training.data.sources import cache_error
from harness.training.data.tokenizer import ByteTokenizer, Tokenizer, encode_documents, largest_id

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

T = TypeVar("T")

_DOCUMENTS_AT_ONCE = 256

# Part of the cache key: raise it when the same documents give other blocks.
_FORMAT = 1


def make_blocks(
    documents: Dataset, tokenizer: Tokenizer, block_size: int, cache_dir: str | os.PathLike[str] | None = None
) -> Dataset:
    """The documents' ids in blocks of `block_size`: a `datasets.Dataset` of `input_ids`, int64 tensors.

    What does not fill the last block is dropped. The result is kept in `cache_dir` (default
    HF_DATASETS_CACHE) under a name made from documents, tokenizer and block size, and a second call maps
    nothing. Raises UserError if `block_size` < 2, the documents do not fill one block, or the cache cannot be
    written.
    """
    import datasets
    from datasets import Features, List, Value

    if block_size < 2:
        raise UserError(f"--block_size {block_size}: a block of fewer than 2 tokens predicts nothing")
    key = _fingerprint(documents, tokenizer, block_size)
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "blocks"
    joiner = BlockJoiner(tokenizer, block_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        blocks = documents.map(
            joiner,
            batched=True,
            batch_size=_DOCUMENTS_AT_ONCE,
            remove_columns=documents.column_names,
            features=Features({"input_ids": List(Value(joiner.dtype.name), length=block_size)}),
            cache_file_name=str(folder / f"{key}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=key,
            desc=f"Cutting text into blocks of {block_size}",
        )
    except OSError as error:
        raise cache_error(error, cache_dir) from error
    if not len(blocks):
        total = sum(map(len, encode_documents(tokenizer, documents["text"])))
        raise UserError(f"the text makes {total} tokens, less than one block of {block_size}: lower --block_size")
    return blocks.with_format("torch")


class BlockJoiner:
    """Cuts batches of documents into blocks; what is left of one batch opens the next one's first block.

    It holds at most `block_size` - 1 ids between calls, and must see the batches in order, in one process.
    """

    def __init__(self, tokenizer: Tokenizer, block_size: int) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.dtype = np.dtype(np.uint16 if largest_id(tokenizer) < 2**16 else np.int32)
        self.rest = np.empty(0, dtype=self.dtype)

    def cut(self, texts: list[str]) -> npt.NDArray[np.integer]:
        """The blocks, [n, block_size], that end within these documents."""
        ids = np.concatenate([self.rest, *encode_documents(self.tokenizer, texts, self.dtype)])
        whole = len(ids) // self.block_size * self.block_size
        self.rest = ids[whole:].copy()
        return ids[:whole].reshape(-1, self.block_size)

    def __call__(self, batch: dict[str, list[str]]) -> pa.Table:
        import pyarrow as pa

        flat = pa.array(self.cut(batch["text"]).reshape(-1))
        return pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(flat, self.block_size)})


def once_per_host(build: Callable[[], T], *, local_rank: int, barrier: Callable[[], object]) -> T:
    """Let local rank 0 of each host build what is then read from its cache, and the others wait at `barrier`.

    All ranks call it, and the barrier must have the patience for a long corpus. If the building fails the
    barrier is still passed, and the others fail in `build` for themselves: an error, never a hang.
    """
    if local_rank != 0:
        barrier()
        return build()
    try:
        return build()
    finally:
        barrier()


def _fingerprint(documents: Dataset, tokenizer: Tokenizer, block_size: int) -> str:
    """A name for the blocks, the same in every process and run: made of the inputs, of no pickled code."""
    parts = (str(_FORMAT), documents._fingerprint, str(block_size), _identity(tokenizer))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _identity(tokenizer: Tokenizer) -> str:
    """All that decides how a tokenizer cuts text: not its pickle, which changes with use."""
    if isinstance(tokenizer, ByteTokenizer):
        return repr(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for state_of_the_last_call in ("truncation", "padding"):
            rules.pop(state_of_the_last_call, None)
        parts = [json.dumps(rules, sort_keys=True)]
    else:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            parts = [file.read_text(encoding="latin-1") for file in sorted(Path(folder).iterdir())]
    return "\0".join((type(tokenizer).__name__, str(tokenizer.eos_token_id), *parts))
