"""Turn conversations into samples of one length: ids, labels for the answers only, position ids if packed.

Each conversation is tokenised once and kept on disk, cut to the length of a sample. A shard holds consecutive
conversations: `ids`, `answers` (whether an id is in the loss), `ends` (where each conversation ends) and `lost` (how
many ids each conversation lost).

A sample is padded to `block_size` tokens when it is read, or to fewer if its batch needs fewer: one conversation padded
on the right, or several packed, with position ids that restart at 0 with each. Padding has label -100. As it is on the
right, no real token attends to it, so its id matters to router losses alone. The assignment of packed conversations to
samples is kept on disk too, so memory does not grow with the number of samples.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.batches.collate import IGNORED
from harness.data.blocks import require_block_size, smallest_dtype
from harness.data.chat import ConversationEncoder, Encoded
from harness.data.on_disk.cache import USUAL, Preparation, fingerprint_of
from harness.data.on_disk.shards import batches, bytes_of_rows, make_shards, mapped, rows_of_shards
from harness.data.packing import Bins, best_fit_decreasing
from harness.data.tokenizer import Tokenizer, identity, largest_id, padding_id
from harness.errors import UserError
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset


# Part of the cache key. Increase it when a code change gives other samples for the same conversations.
_FORMAT = 6


class EncodedConversations:
    """The tokenised conversations of all shards, memory-mapped: `[i]` is read on access."""

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
        """Return the number of ids of each of these conversations, by default of all."""
        if rows is None:
            return np.concatenate([np.diff(ends, prepend=0).astype(np.int32) for ends in self._ends])
        asked = np.asarray(rows)
        shards = np.searchsorted(self._last, asked, side="right")
        found = np.empty(len(asked), dtype=np.int32)
        for shard in np.unique(shards):
            here = shards == shard
            ends = self._ends[shard]
            row = asked[here] - (self._last[shard] - len(ends))
            found[here] = ends[row] - np.where(row > 0, ends[row - 1], 0)
        return found

    def tokens(self) -> int:
        """Return the number of ids of all conversations."""
        return sum(map(len, self._ids))

    def learnt(self) -> int:
        """Return the number of ids in the loss."""
        return self._learnt

    def lost(self) -> tuple[int, int]:
        """Return how many conversations were cut, and how many ids they lost."""
        return sum(int(np.count_nonzero(lost)) for lost in self._lost), sum(int(lost.sum()) for lost in self._lost)


class Samples:
    """A map-style data set of dicts `input_ids`, `labels` and, if packed, `position_ids`: int64 [block_size].

    Batches are padded to their longest sample (`batches/padding.py`).

    Args:
        conversations: tokenised, each at its own length.
        bins: the conversations of each sample; None if samples are single conversations, not packed.
        pad: the id that fills up samples.
        summary: one line on how many conversations were cut, packed and dropped.
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
        """Return the number of tokens of these samples, by default of all, without padding."""
        if self.bins is None:
            return self.conversations.lengths(rows)
        members = [self.bins[row] for row in (range(len(self)) if rows is None else np.asarray(rows).tolist())]
        # One look-up for the conversations of all samples, then a sum for each sample.
        starts = np.cumsum([0, *map(len, members[:-1])])
        return np.add.reduceat(self.conversations.lengths(list(chain(*members))), starts)

    def padded_to(self, length: int) -> Samples:
        """Return the same samples padded to `length` tokens; a longer sample must not be read from the result."""
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
    """Join conversations into one sample: ids padded with `pad`, labels and position ids, each int64 [block_size].

    Together they must not be longer than `block_size`.
    """
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
    documents: Dataset,
    tokenizer: Tokenizer,
    block_size: int,
    how: Preparation = USUAL,
    *,
    packing: bool = False,
    vocabulary: int | None = None,
) -> Samples:
    """Tokenise conversations (`conversation`, `place`) into samples of `block_size` tokens, cached as in `make_blocks`.

    A longer conversation loses its end, and is dropped if no answer is left. Samples are padded with the tokenizer's
    padding id, if it is below `vocabulary`, the number of ids of the model.

    Raises:
        UserError: the tokenizer has no chat template, the template cannot render a conversation, or none is left.
    """
    require_block_size(block_size)
    encode = ConversationEncoder(tokenizer)
    dtype = smallest_dtype(largest_id(tokenizer))
    lengths = bytes_of_rows(documents, "conversation")  # the conversations are not read

    def write(folder: Path, rows: tuple[int, int]) -> None:
        ends = array("q")
        lost = array("q")
        learnt = 0
        with (folder / "ids").open("wb") as ids, (folder / "answers").open("wb") as answers:
            for start, stop in batches(lengths, *rows):
                batch = documents[start:stop]
                for conversation, location in zip(batch["conversation"], batch["place"], strict=True):
                    encoded = encode(conversation, location)
                    kept = encoded.cut(block_size)
                    if kept is None:
                        continue
                    kept.ids.astype(dtype).tofile(ids)
                    kept.answers.tofile(answers)
                    ends.append((ends[-1] if ends else 0) + len(kept.ids))
                    lost.append(len(encoded.ids) - len(kept.ids))
                    learnt += int(np.count_nonzero(kept.answers[1:]))
        for name, values in {"ends": ends, "lost": lost, "learnt": [learnt]}.items():
            np.asarray(values, dtype=np.int64).tofile(folder / name)

    def write_bins(folder: Path, _: None) -> None:
        bins = best_fit_decreasing(conversations.lengths(), block_size)
        bins.indices.astype(np.int64).tofile(folder / "indices")
        bins.ends.astype(np.int64).tofile(folder / "ends")

    key = "samples", _FORMAT, fingerprint_of(documents), block_size, identity(tokenizer), encode.template
    folder = how.folder(*key)
    bins = None
    try:
        doing = "encoding conversations"
        folders = make_shards(folder, rows_of_shards(lengths), write, doing=doing, say=how.say, workers=how.workers)
        conversations = EncodedConversations(folders, dtype)
        if packing and len(conversations):
            (packed,) = make_shards(folder / "packed", [None], write_bins, doing="packing")
            bins = Bins(mapped(packed / "indices", np.int64), mapped(packed / "ends", np.int64))
    except OSError as error:
        raise how.error(error) from error
    if not len(conversations):
        raise UserError(
            f"none of {counted(len(documents), 'conversation')} has an answer within the first "
            f"{counted(block_size, 'token')}: raise --block_size"
        )
    summary = _summary(len(documents), conversations, bins, block_size)
    return Samples(conversations, bins, block_size, pad=padding_id(tokenizer, vocabulary), summary=summary)


def _summary(total: int, conversations: EncodedConversations, bins: Bins | None, size: int) -> str:
    """Return one line for the user: how many conversations were packed, cut and dropped."""
    tokens = conversations.tokens()
    blocks = len(conversations if bins is None else bins)
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
