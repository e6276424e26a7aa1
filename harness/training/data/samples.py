"""Conversations -> samples of one length: ids, labels of the answers alone, and position ids where they are packed.

Each conversation is encoded once and kept on disk at its own length. Only when a sample is read is it laid out
on `block_size` tokens: alone and padded on the right, or packed with others, none cut, position ids beginning at 0
with each. Padding is never looked at by what counts and predicts nothing, so any id serves for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harness.config.errors import UserError
from harness.config.wording import counted
from harness.training.data.blocks import require_block_size, smallest_dtype
from harness.training.data.cache import fingerprint, identity, map_once
from harness.training.data.chat import ConversationEncoder
from harness.training.data.collate import IGNORED
from harness.training.data.packing import best_fit_decreasing
from harness.training.data.tokenizer import Tokenizer, end_of_document_id, largest_id

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache key: raise it when the same conversations give other samples.
_FORMAT = 1


class Samples:
    """A map-style data set of dicts `input_ids`, `labels` and, if packed, `position_ids`: int64 of `block_size`.

    Args:
        rows: `input_ids` and `answers`, each at its own length.
        bins: the rows of each sample.
        pad: the id that fills up.
        packed: whether samples have position ids.
        summary: what became of the conversations, one line.
    """

    def __init__(
        self, rows: Dataset, bins: Sequence[Sequence[int]], block_size: int, *, pad: int, packed: bool, summary: str
    ) -> None:
        self.rows = rows.with_format("numpy", columns=["input_ids", "answers"])
        self.bins = bins
        self.block_size = block_size
        self.pad = pad
        self.packed = packed
        self.summary = summary

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = np.full(self.block_size, self.pad, dtype=np.int64)
        labels = np.full(self.block_size, IGNORED, dtype=np.int64)
        positions = np.empty(self.block_size, dtype=np.int64)
        start = 0
        for row in map(self.rows.__getitem__, self.bins[index]):
            stop = start + len(row["input_ids"])
            ids[start:stop] = row["input_ids"]
            labels[start:stop] = np.where(row["answers"], row["input_ids"].astype(np.int64), IGNORED)
            positions[start:stop] = np.arange(stop - start)
            start = stop
        positions[start:] = np.arange(self.block_size - start)
        columns = {"input_ids": ids, "labels": labels}
        if self.packed:
            columns["position_ids"] = positions
        return {name: torch.from_numpy(values) for name, values in columns.items()}


def make_samples(
    documents: Dataset,
    tokenizer: Tokenizer,
    block_size: int,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    packing: bool = False,
) -> Samples:
    """Conversations (`conversation`, `place`) as samples of `block_size`; the ids are kept as `make_blocks` keeps them.

    What is longer than `block_size` loses its end; where no answer is left the conversation is dropped. Raises
    UserError for a tokenizer without a chat template, a conversation that it cannot write, and if none is left.
    """
    from datasets import Features, List, Value

    require_block_size(block_size)
    encoder = ConversationEncoder(tokenizer)
    dtype = smallest_dtype(largest_id(tokenizer))
    rows = map_once(
        documents,
        _Cutter(encoder, block_size),
        Features(
            {
                "input_ids": List(Value(dtype.name)),
                "answers": List(Value("bool")),
                "length": Value("int32"),
                "cut": Value("int64"),
            }
        ),
        fingerprint("samples", _FORMAT, documents._fingerprint, block_size, identity(tokenizer), encoder.template),
        cache_dir=cache_dir,
        said="Encoding conversations",
    )
    if not len(rows):
        raise UserError(
            f"none of {counted(len(documents), 'conversation')} has an answer within the first "
            f"{counted(block_size, 'token')}: "
            "raise --block_size"
        )
    lengths = rows["length"][:]
    bins = best_fit_decreasing(lengths, block_size) if packing else [[index] for index in range(len(rows))]
    return Samples(
        rows,
        bins,
        block_size,
        pad=end_of_document_id(tokenizer),
        packed=packing,
        summary=_summary(len(documents), lengths, rows["cut"][:], len(bins), block_size, packing),
    )


class _Cutter:
    """Encodes batches of conversations and cuts each to `block_size`; drops those that no answer is left of."""

    def __init__(self, encoder: ConversationEncoder, block_size: int) -> None:
        self.encoder = encoder
        self.block_size = block_size

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"input_ids": [], "answers": [], "length": [], "cut": []}
        for conversation, place in zip(batch["conversation"], batch["place"], strict=True):
            encoded = self.encoder(conversation, place)
            answers = encoded.answers[: self.block_size]
            if not answers[1:].any():  # the first token is never predicted
                continue
            columns["input_ids"].append(encoded.ids[: self.block_size])
            columns["answers"].append(answers)
            columns["length"].append(len(answers))
            columns["cut"].append(len(encoded.ids) - len(answers))
        return columns


def _summary(total: int, lengths: Sequence[int], cut: Sequence[int], blocks: int, size: int, packing: bool) -> str:
    """What became of the conversations, in one line."""
    said = [f"{counted(total, 'conversation')} of {counted(sum(lengths), 'token')}"]
    if packing:
        said.append(
            f"packed into {counted(blocks, 'block')} of {size}, {1 - sum(lengths) / (blocks * size):.0%} padding"
        )
    else:
        said.append(f"padded to {size}, {1 - sum(lengths) / (blocks * size):.0%} padding")
    if any(cut):
        said.append(f"{counted(sum(map(bool, cut)), 'longer one')} lost {counted(sum(cut), 'token')}")
    if total > len(lengths):
        said.append(f"{total - len(lengths):,} dropped: no answer within {size} tokens")
    return "; ".join([", ".join(said[:2]), *said[2:]])
