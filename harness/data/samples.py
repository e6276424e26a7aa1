"""Conversations -> samples of one length: ids, labels of the answers alone, and position ids where they are packed.

Each conversation is encoded once and kept on disk at its own length. Only when a sample is read is it laid out
on `block_size` tokens, or fewer where its batch needs fewer: alone and padded on the right, or packed with others, none
cut, position ids beginning at 0 with each. Padding is never looked at by what counts and predicts nothing, so any id
serves for it. Which conversations are packed together is kept on disk too: a process maps it, as it maps the ids, and
holds nothing for each sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.data.batches.collate import IGNORED
from harness.data.blocks import require_block_size, smallest_dtype
from harness.data.chat import ConversationEncoder, Encoded
from harness.data.conversations import Conversations, EncodedConversations
from harness.data.on_disk.cache import USUAL, Preparation, fingerprint_of, identity
from harness.data.on_disk.mapping import mapped
from harness.data.on_disk.shards import make_shards
from harness.data.packing import Bins, best_fit_decreasing
from harness.data.tokenizer import Tokenizer, end_of_document_id, largest_id
from harness.errors import UserError
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache key: raise it when the same conversations give other samples.
_FORMAT = 5


class Samples:
    """A map-style data set of dicts `input_ids`, `labels` and, if packed, `position_ids`: int64 of `block_size`.

    Batches of it are padded to their longest sample, as `batches/padding.py` says.

    Args:
        conversations: each at its own length.
        bins: the conversations of each sample; None: one a sample, not packed.
        pad: the id that fills up.
        summary: what became of the conversations, one line.
    """

    def __init__(
        self, conversations: EncodedConversations, bins: Bins | None, block_size: int, *, pad: int, summary: str
    ) -> None:
        self.conversations = conversations
        self.bins = bins
        self.block_size = block_size
        self.packing = bins is not None
        self.pad = pad
        self.summary = summary

    def __len__(self) -> int:
        return len(self.conversations if self.bins is None else self.bins)

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the tokens of these samples, by default of all, without padding."""
        if self.bins is None:
            return self.conversations.lengths(rows)
        members = [self.bins[row] for row in (range(len(self)) if rows is None else np.asarray(rows).tolist())]
        starts = np.cumsum([0, *map(len, members[:-1])])
        return np.add.reduceat(self.conversations.lengths(list(chain(*members))), starts)

    def padded_to(self, length: int) -> Samples:
        """Return these samples at another length, to read those that are not longer."""
        return Samples(self.conversations, self.bins, length, pad=self.pad, summary=self.summary)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        members = map(self.conversations.__getitem__, [index] if self.bins is None else self.bins[index])
        columns = laid_out(members, self.block_size, self.pad)
        if self.bins is None:
            del columns["position_ids"]
        return columns


def laid_out(conversations: Iterable[Encoded], block_size: int, pad: int) -> dict[str, Tensor]:
    """Return a sample of conversations that fit into it, one behind the other, filled up with the id `pad`."""
    ids = np.full(block_size, pad, dtype=np.int64)
    labels = np.full(block_size, IGNORED, dtype=np.int64)
    positions = np.empty(block_size, dtype=np.int64)
    start = 0
    for conversation in conversations:
        stop = start + len(conversation.ids)
        ids[start:stop] = conversation.ids
        labels[start:stop] = np.where(conversation.answers, conversation.ids, IGNORED)
        positions[start:stop] = np.arange(stop - start)
        start = stop
    positions[start:] = np.arange(block_size - start)
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def make_samples(
    documents: Dataset, tokenizer: Tokenizer, block_size: int, how: Preparation = USUAL, *, packing: bool = False
) -> Samples:
    """Return conversations (`conversation`, `place`) as samples of `block_size`; kept as `make_blocks` keeps its ids.

    What is longer than `block_size` loses its end; where no answer is left the conversation is dropped. Raises
    UserError for a tokenizer without a chat template, a conversation that it cannot write, and if none is left.
    """
    require_block_size(block_size)
    encoder = ConversationEncoder(tokenizer)
    dtype = smallest_dtype(largest_id(tokenizer))
    data = fingerprint_of(documents)
    folder = how.folder("samples", _FORMAT, data, block_size, identity(tokenizer), encoder.template)
    try:
        source = Conversations.of(documents, encoder, block_size, dtype)
        folders = make_shards(
            folder, source.shards(), source.write, doing="encoding conversations", say=how.say, workers=how.workers
        )
        conversations = EncodedConversations(folders, dtype)
        bins = _packed(conversations, folder, block_size) if packing and len(conversations) else None
    except OSError as error:
        raise how.error(error) from error
    if not len(conversations):
        raise UserError(
            f"none of {counted(len(documents), 'conversation')} has an answer within the first "
            f"{counted(block_size, 'token')}: "
            "raise --block_size"
        )
    summary = _summary(len(documents), conversations, bins, block_size)
    return Samples(conversations, bins, block_size, pad=end_of_document_id(tokenizer), summary=summary)


def _packed(conversations: EncodedConversations, folder: Path, size: int) -> Bins:
    """Return which conversations share a block of `size`, mapped from `folder`; found out once."""

    def write(place: Path, _: None) -> None:
        bins = best_fit_decreasing(conversations.lengths(), size)
        bins.indices.astype(np.int64).tofile(place / "indices")
        bins.ends.astype(np.int64).tofile(place / "ends")

    (place,) = make_shards(folder / "packed", [None], write, doing="packing")
    return Bins(*(mapped(place / name, np.int64) for name in ("indices", "ends")))


def _summary(total: int, conversations: EncodedConversations, bins: Bins | None, size: int) -> str:
    """Return what became of the conversations, in one line."""
    tokens, blocks = conversations.tokens(), len(conversations if bins is None else bins)
    said = [f"{counted(total, 'conversation')} of {counted(tokens, 'token')}"]
    if bins is not None:
        padding = f"{1 - tokens / (blocks * size):.0%} padding"
        said[0] += f", packed into {counted(blocks, 'block')} of {size}, {padding}"
    cut, lost = conversations.lost()
    if cut:
        said.append(f"{counted(cut, 'longer one')} lost {counted(lost, 'token')}")
    if total > len(conversations):
        said.append(f"{total - len(conversations):,} dropped: no answer within {size} tokens")
    return "; ".join(said)
