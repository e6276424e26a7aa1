"""How the rows of a stream become samples, each with the place from which its stream can go on behind it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from harness.data.blocks import positions_of
from harness.data.chat import ConversationEncoder, Encoded
from harness.data.files.rows import TEXT
from harness.data.on_disk.progress import Progress
from harness.data.packing import best_fit_decreasing
from harness.data.pieces import PieceEncoder
from harness.data.samples import laid_out
from harness.data.streaming.rows import Mark, Row, Rows
from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.resilience.watch.activity import beat

PACKED_TOGETHER = 256
"""Conversations of a stream of which each packed sample is made."""

Ids = npt.NDArray[np.int64]
_MOST_UNUSED = 10_000
_ROWS_BETWEEN_SIGNS = 64  # of life, while rows are passed over


def _none() -> Ids:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Place:
    """Where a stream stands: `sample` is the next one, made of `rest` and of the rows from `row` of `section` on.

    Attributes:
        starts: of the documents that begin in `rest`.
        mark: from where `row` can be reached, as `Rows.mark` gives it.
    """

    sample: int = 0
    section: int = 0
    row: int = 0
    rest: Ids = field(default_factory=_none)
    starts: Ids = field(default_factory=_none)
    mark: Mark = field(default_factory=dict)


Sample: TypeAlias = object
"""What the collator takes."""
Made = Iterator[tuple[Sample, Place | None]]
"""Samples, and after each the place of the next; None where the stream can only go on from an earlier one."""


class Layout(Protocol):
    """Makes samples of rows."""

    @property
    def key(self) -> tuple[object, ...]:
        """How it makes them."""

    def __call__(self, rows: Rows, origin: Place) -> Made:
        """Give the samples from a place on, without end."""


class AsTheyAre:
    """Each row is a sample."""

    key: tuple[object, ...] = ()

    def __call__(self, rows: Rows, origin: Place) -> Made:
        """Give the rows from a place on."""
        numbered = enumerate(_neighbours(rows, origin), origin.sample + 1)
        for sample, (_, row, following, _) in numbered:
            yield row, Place(sample, *following)


class TextBlocks:
    """Documents joined and cut into blocks, with position ids if they are packed."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> None:
        self._pieces, self._size, self._packing = PieceEncoder(tokenizer), block_size, packing
        self.key: tuple[object, ...] = ("blocks", block_size, packing)

    def __call__(self, rows: Rows, origin: Place) -> Made:
        """Give the blocks from a place on."""
        sample, rest, starts, size = origin.sample, origin.rest, origin.starts, self._size
        for before, document, following, after in _neighbours(rows, origin):
            part = int(document["part"])
            continued = str(after["text"]) if after.get("part", 0) != 0 else None
            text_before = str(before["text"]) if part else ""
            (ids,) = self._pieces([str(document["text"])], [part], text_before, continued)
            if part == 0 and self._packing:
                starts = np.append(starts, len(rest))
            rest = np.concatenate([rest, ids.astype(np.int64)])
            while len(rest) >= size:
                block, rest = rest[:size], rest[size:]
                inside, starts = starts[starts < size], starts[starts >= size] - size
                sample += 1
                made = {"input_ids": torch.from_numpy(block)}
                if self._packing:
                    made["position_ids"] = torch.from_numpy(positions_of(inside, size))
                yield made, Place(sample, *following, rest, starts)


class ConversationSamples:
    """Conversations, each padded on the right; or packed, those that were read together, none cut."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> None:
        self._chat, self._size, self._packing = ConversationEncoder(tokenizer), block_size, packing
        self.key: tuple[object, ...] = ("conversations", block_size, packing, self._chat.template)

    def __call__(self, rows: Rows, origin: Place) -> Made:
        """Give the samples from a place on."""
        return (self._packed if self._packing else self._padded)(rows, origin)

    def _padded(self, rows: Rows, origin: Place) -> Made:
        for sample, (encoded, following) in enumerate(self._usable(rows, origin), origin.sample + 1):
            made = laid_out([encoded], self._size, self._chat.end)
            del made["position_ids"]
            made["attention_mask"] = (torch.arange(self._size) < len(encoded.ids)).long()
            yield made, Place(sample, *following)

    def _packed(self, rows: Rows, origin: Place) -> Made:
        usable, sample = self._usable(rows, origin), origin.sample
        while together := list(itertools.islice(usable, PACKED_TOGETHER)):
            bins = best_fit_decreasing([len(encoded.ids) for encoded, _ in together], self._size)
            for number in range(len(bins)):
                sample += 1
                place = Place(sample, *together[-1][1]) if number == len(bins) - 1 else None
                yield laid_out([together[i][0] for i in bins[number]], self._size, self._chat.end), place

    def _usable(self, rows: Rows, origin: Place) -> Iterator[tuple[Encoded, tuple[int, int]]]:
        """Give the conversations that have an answer within the length of a sample, and where the next row is."""
        unused = 0
        for _, document, following, _ in _neighbours(rows, origin):
            found = self._chat(str(document["conversation"]), str(document["place"]))
            encoded = Encoded(ids=found.ids[: self._size], answers=found.answers[: self._size])
            if encoded.answers[1:].any():
                unused = 0
                yield encoded, following
                continue
            unused += 1
            if unused > _MOST_UNUSED:
                raise UserError(
                    f"{document['place']}: {unused} conversations in a row have no answer within the first "
                    f"{self._size} tokens: raise --block_size"
                )


def layout_of(kind: str | None, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> Layout:
    """Return how rows of text or of conversations become samples."""
    makes: type[TextBlocks | ConversationSamples] = TextBlocks if kind == TEXT else ConversationSamples
    return makes(tokenizer, block_size, packing=packing)


def _neighbours(rows: Rows, origin: Place) -> Iterator[tuple[Row, Row, tuple[int, int], Row]]:
    """Give each row from a place on, with the row before (None: it is the first), the next one's place, and that.

    A place that there is no more, as a file has become shorter, is the beginning of the next section.
    """
    before, first = None, origin.mark.get("row", 0)
    passed = Progress(max(origin.row - first, 1), "passing over rows", rows.say)
    is_there, last = False, first - 1
    for (section, row, found), (*following, after) in itertools.pairwise(rows.since(origin.section, origin.mark)):
        if not is_there and section == origin.section and last < row < origin.row:
            last = row
            if row % _ROWS_BETWEEN_SIGNS == 0:
                beat("passing over rows")
                passed.show(row - first)
        else:
            if not is_there:
                passed.close()
            is_there = True
            yield before, found, (following[0], following[1]), after
        before = found
