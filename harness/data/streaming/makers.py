"""Make samples from the documents of a stream: blocks of text, or conversations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from harness.data.blocks import positions_of
from harness.data.chat import ConversationEncoder, Encoded
from harness.data.packing import best_fit_decreasing
from harness.data.piece_encoder import PieceEncoder
from harness.data.rows.kinds import TEXT
from harness.data.samples import laid_out
from harness.data.streaming.iterable import Rows
from harness.data.streaming.source import PositionedSamples, SampleMaker, StreamPosition, neighbours
from harness.data.tokenizer import Tokenizer, padding_id
from harness.errors import UserError

PACKED_TOGETHER = 256
"""Number of consecutive conversations of a stream that are packed at a time."""
_MOST_UNUSED = 10_000  # conversations in a row without a usable answer, before the stream gives up


class TextBlocks(SampleMaker):
    """Documents joined and cut into blocks, with position ids if they are packed."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> None:
        self._pieces = PieceEncoder(tokenizer)
        self._size = block_size
        self._packing = packing
        self.key = ("blocks", block_size, packing)

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Yield the blocks from a position on: `input_ids` and, if packed, `position_ids`, int64 [block_size]."""
        sample = origin.sample
        rest = origin.rest
        starts = origin.starts
        size = self._size
        for before, document, following, after in neighbours(rows, origin):
            part = int(document["part"])
            continued = str(after["text"]) if after.get("part", 0) != 0 else None
            text_before = str(before["text"]) if part else ""
            (ids,) = self._pieces([str(document["text"])], [part], text_before, continued)
            if part == 0 and self._packing:
                starts = np.append(starts, len(rest))
            rest = np.concatenate([rest, ids.astype(np.int64)])
            while len(rest) >= size:
                block = rest[:size]
                rest = rest[size:]
                inside = starts[starts < size]
                starts = starts[starts >= size] - size
                sample += 1
                made = {"input_ids": torch.from_numpy(block)}
                if self._packing:
                    made["position_ids"] = torch.from_numpy(positions_of(inside, size))
                yield made, StreamPosition(sample, *following, rest, starts)


class ConversationSamples(SampleMaker):
    """Conversations, each padded on the right; or packed without cutting any, 256 consecutive ones at a time."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, *, packing: bool, vocabulary: int | None = None) -> None:
        self._chat = ConversationEncoder(tokenizer)
        self._pad = padding_id(tokenizer, vocabulary)
        self._size = block_size
        self._packing = packing
        self.key = ("conversations", block_size, packing, self._chat.template, self._pad)

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Yield the samples from a position on; padded ones have an `attention_mask`, packed ones `position_ids`."""
        usable = self._usable(rows, origin)
        sample = origin.sample
        if not self._packing:
            for encoded, following in usable:
                sample += 1
                made = laid_out([encoded], self._size, self._pad)
                del made["position_ids"]
                made["attention_mask"] = (torch.arange(self._size) < len(encoded.ids)).long()
                yield made, StreamPosition(sample, *following)
        while together := list(itertools.islice(usable, PACKED_TOGETHER)):
            bins = best_fit_decreasing([len(encoded.ids) for encoded, _ in together], self._size)
            for number in range(len(bins)):
                sample += 1
                # There is no position between samples packed together: a resume packs the 256 conversations again.
                position = StreamPosition(sample, *together[-1][1]) if number == len(bins) - 1 else None
                yield laid_out([together[i][0] for i in bins[number]], self._size, self._pad), position

    def _usable(self, rows: Rows, origin: StreamPosition) -> Iterator[tuple[Encoded, tuple[int, int]]]:
        """Yield conversations with an answer within a sample's length, each with (section, number) of the next row."""
        unused = 0
        for _, document, following, _ in neighbours(rows, origin):
            encoded = self._chat(str(document["conversation"]), str(document["place"])).cut(self._size)
            if encoded is not None:
                unused = 0
                yield encoded, following
                continue
            unused += 1
            if unused > _MOST_UNUSED:
                raise UserError(
                    f"{document['place']}: {unused} conversations in a row have no answer within the first "
                    f"{self._size} tokens: raise --block_size"
                )


def sample_maker(
    kind: str | None, tokenizer: Tokenizer, block_size: int, *, packing: bool, vocabulary: int | None = None
) -> SampleMaker:
    """Return the maker of samples for rows of this kind, text or conversations; `vocabulary`: see `make_samples`."""
    if kind == TEXT:
        return TextBlocks(tokenizer, block_size, packing=packing)
    return ConversationSamples(tokenizer, block_size, packing=packing, vocabulary=vocabulary)
