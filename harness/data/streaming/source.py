"""Streams of samples: rows become samples, and one or several streams one endless data set.

The k-th sample is a function of rows, shares and seed alone: every rank that reads data passes over all rows and makes
all samples. A checkpoint keeps where each stream stands, so a resumed run passes over rows without tokenising them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from harness.config.values.json_object import JsonObject
from harness.data.batches.order import Indices, OwnOrder, SeveralSources, sample_order
from harness.data.blocks import positions_of
from harness.data.chat import ConversationEncoder, Encoded
from harness.data.files.rows import TEXT
from harness.data.mixing import Shares
from harness.data.on_disk.cache import fingerprint
from harness.data.on_disk.progress import PreparationProgress
from harness.data.packing import best_fit_decreasing
from harness.data.pieces import PieceEncoder
from harness.data.samples import laid_out
from harness.data.streaming.rows import Mark, Row, Rows
from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.parallel.generators import seed_of
from harness.resilience.process.activity import beat

PACKED_TOGETHER = 256
"""Conversations of a stream that are packed together: samples are made of as many at a time."""
ENDLESS = 1 << 60
"""The length of a stream, which has none."""

Sample: TypeAlias = object
"""What the collator takes."""
_MOST_UNUSED = 10_000
_ROWS_BETWEEN_BEATS = 64  # while rows are passed over, so that the watch does not take the rank for hanging


def _no_ids() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class StreamPosition:
    """Where a stream stands: the next sample is made of `rest` and of the rows from `row` of `section` on.

    Attributes:
        sample: the number of the next sample.
        rest: ids that are read, but in no sample yet.
        starts: where documents begin in `rest`.
        mark: from where `row` can be reached, as `Rows.mark` gives it.
    """

    sample: int = 0
    section: int = 0
    row: int = 0
    rest: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    starts: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    mark: Mark = field(default_factory=dict)


PositionedSamples = Iterator[tuple[Sample, StreamPosition | None]]
"""Samples, each with the position of the next one; None where the stream can only go on from an earlier position."""


class SampleMaker(ABC):
    """Makes samples of the rows of a stream.

    Attributes:
        key: what the samples depend on besides the rows.
    """

    key: tuple[object, ...]

    @abstractmethod
    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Give the samples from a position on, without end."""


class RowsAsTheyAre(SampleMaker):
    """Each row is a sample."""

    key = ()

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Give the rows from a position on."""
        for sample, (_, row, following, _) in enumerate(_neighbours(rows, origin), origin.sample + 1):
            yield row, StreamPosition(sample, *following)


class TextBlocks(SampleMaker):
    """Documents joined and cut into blocks, with position ids if they are packed."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> None:
        self._pieces, self._size, self._packing = PieceEncoder(tokenizer), block_size, packing
        self.key = ("blocks", block_size, packing)

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Give the blocks from a position on: `input_ids` and, if packed, `position_ids`, int64 [block_size]."""
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
                yield made, StreamPosition(sample, *following, rest, starts)


class ConversationSamples(SampleMaker):
    """Conversations, each padded on the right; or packed with those that are read together, none cut."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> None:
        self._chat, self._size, self._packing = ConversationEncoder(tokenizer), block_size, packing
        self.key = ("conversations", block_size, packing, self._chat.template)

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Give the samples from a position on; padded ones have an `attention_mask`, packed ones `position_ids`."""
        usable, sample = self._usable(rows, origin), origin.sample
        if not self._packing:
            for encoded, following in usable:
                sample += 1
                made = laid_out([encoded], self._size, self._chat.end)
                del made["position_ids"]
                made["attention_mask"] = (torch.arange(self._size) < len(encoded.ids)).long()
                yield made, StreamPosition(sample, *following)
        while together := list(itertools.islice(usable, PACKED_TOGETHER)):
            bins = best_fit_decreasing([len(encoded.ids) for encoded, _ in together], self._size)
            for number in range(len(bins)):
                sample += 1
                # within these conversations the stream cannot go on: they are packed anew from the first one
                position = StreamPosition(sample, *together[-1][1]) if number == len(bins) - 1 else None
                yield laid_out([together[i][0] for i in bins[number]], self._size, self._chat.end), position

    def _usable(self, rows: Rows, origin: StreamPosition) -> Iterator[tuple[Encoded, tuple[int, int]]]:
        """Give the conversations that have an answer within the length of a sample, and where the next row is."""
        unused = 0
        for _, document, following, _ in _neighbours(rows, origin):
            found = self._chat(str(document["conversation"]), str(document["place"]))
            encoded = Encoded(ids=found.ids[: self._size], answers=found.answers[: self._size])
            if encoded.answers[1:].any():  # the first token is never predicted
                unused = 0
                yield encoded, following
                continue
            unused += 1
            if unused > _MOST_UNUSED:
                raise UserError(
                    f"{document['place']}: {unused} conversations in a row have no answer within the first "
                    f"{self._size} tokens: raise --block_size"
                )


def sample_maker(kind: str | None, tokenizer: Tokenizer, block_size: int, *, packing: bool) -> SampleMaker:
    """Return what makes samples of rows of this kind: text or conversations."""
    maker = TextBlocks if kind == TEXT else ConversationSamples
    return maker(tokenizer, block_size, packing=packing)


def _neighbours(rows: Rows, origin: StreamPosition) -> Iterator[tuple[Row, Row, tuple[int, int], Row]]:
    """Give each row from a position on: the row before (None: it is the first), the row, the next one's section and
    number, and the next one.

    Where a file has become shorter and the position is past its end, the rows go on with the next section.
    """
    before, first = None, origin.mark.get("row", 0)
    progress = PreparationProgress(max(origin.row - first, 1), "passing over rows", rows.say)
    is_there, last = False, first - 1
    for (section, row, found), (*following, after) in itertools.pairwise(rows.since(origin.section, origin.mark)):
        if not is_there and section == origin.section and last < row < origin.row:
            last = row
            if row % _ROWS_BETWEEN_BEATS == 0:
                beat("passing over rows")
                progress.show(row - first)
        else:
            if not is_there:
                progress.close()
            is_there = True
            yield before, found, (following[0], following[1]), after
        before = found


class StreamedSource:
    """The samples of one stream, to be read in order.

    Attributes:
        key: what the samples are made of.
    """

    def __init__(self, rows: Rows, maker: SampleMaker, made_with: str = "") -> None:
        self._rows, self._maker = rows, maker
        self._made = fingerprint(made_with, *maker.key)
        self.key = fingerprint(rows.key, self._made)
        self.seek({})

    def __getitem__(self, index: int) -> Sample:
        self._go_to(index)
        return self._next()

    def seek(self, kept: JsonObject) -> None:
        """Go on from a position that `position` gave; from the beginning where it is empty."""
        numbers = {name: kept.get(name, 0) for name in ("sample", "section", "row")}
        # what was left over of a row is of use only to the tokenizer and the sample length that made it
        is_alike = kept.get("made") == self._made
        rest, starts = (np.array(kept[name] if is_alike else (), dtype=np.int64) for name in ("rest", "starts"))
        self._start(StreamPosition(**numbers, rest=rest, starts=starts, mark=kept.get("mark", {})))

    def position(self, sample: int) -> JsonObject:
        """Return a position, as JSON, from which the stream can give this sample: there, or a few samples before."""
        self._go_to(sample)
        found, origin = self._position, self._origin
        mark = self._rows.mark(found.section, found.row) or (origin.mark if origin.section == found.section else {})
        left_over = {"rest": found.rest.tolist(), "starts": found.starts.tolist(), "made": self._made}
        return {**vars(found), **left_over, "mark": mark, "at": sample}

    def _go_to(self, sample: int) -> None:
        if sample < self._count:  # as after a rollback
            self._start(self._origin)
        while self._count < sample:
            self._next()

    def _start(self, origin: StreamPosition) -> None:
        self._origin = self._position = origin
        self._count, self._coming = origin.sample, self._maker.samples(self._rows, origin)

    def _next(self) -> Sample:
        sample, position = next(self._coming)
        self._count, self._position = self._count + 1, position or self._position
        return sample


class Streamed(OwnOrder, SeveralSources):
    """One or several streams as one data set without end, by shares where there are several.

    Args:
        weights: of the streams, if there are several.
        names: of the streams, if they have some.
        buffer: samples that are read at once and shuffled; below 2 they stay in the order of the streams.
    """

    endless = True

    def __init__(
        self,
        sources: Sequence[StreamedSource],
        weights: Sequence[float] = (),
        buffer: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self.sources, self._buffer, self.names = list(sources), max(buffer, 1), names
        self._shares = Shares(weights or [1.0])
        self.key = fingerprint(*(source.key for source in sources), *self._shares.shares, self._buffer)
        self._number = -1  # of the buffer in memory
        self._held: list[Sample] = []
        self._begin: JsonObject = {}  # its position

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Sample:
        if self._buffer == 1:
            return self._read(index)
        number, inside = divmod(index, self._buffer)
        if number != self._number:
            self._number, self._held = -1, []
            self._begin = self.position(number * self._buffer)
            for place in range(number * self._buffer, (number + 1) * self._buffer):
                beat("reading data")
                self._held.append(self._read(place))
            self._number = number
        return self._held[inside]

    def order(self, consumed: int, count: int, seed: int) -> Indices:
        """Return the `count` samples that follow the first `consumed`: shuffled within each buffer."""
        places = np.arange(consumed, consumed + count)
        if self._buffer == 1:
            return places
        numbers, inside = np.divmod(places, self._buffer)
        for number in np.unique(numbers).tolist():
            drawn = sample_order(self._buffer, seed_of("buffer", seed), number, inside[numbers == number])
            places[numbers == number] = number * self._buffer + drawn
        return places

    def sources_of(self, rows: Sequence[int]) -> list[int]:
        """Return the number of the source of each of these samples."""
        return [int(self._shares.places(row, 1)[0][0]) for row in rows]

    def position(self, consumed: int) -> JsonObject:
        """Return where each source can go on after so many samples, as JSON."""
        number = consumed // self._buffer
        if number == self._number:
            return self._begin
        before = self._shares.before(number * self._buffer)
        return {"sources": [source.position(count) for source, count in zip(self.sources, before, strict=True)]}

    def seek(self, position: JsonObject, consumed: int) -> None:
        """Go on behind the first `consumed` samples, from a position that `position` gave.

        Where the number of sources has changed since, each begins anew.
        """
        self._number = -1
        number = consumed // self._buffer
        positions = position.get("sources", [])
        if len(positions) != len(self.sources):
            positions = [{"sample": 0, "at": 0}] * len(self.sources)
        counts = self._shares.before(number * self._buffer)
        for source, kept, count in zip(self.sources, positions, counts, strict=True):
            at = kept.get("at", count)  # older versions did not keep for which sample a position was asked
            source.seek({**kept, "sample": min(kept["sample"] + count - at, count)})

    def _read(self, index: int) -> Sample:
        (number,), (place,) = self._shares.places(index, 1)
        sample = self.sources[number][int(place)]
        if len(self.sources) == 1:
            return sample
        ids = sample["input_ids"]
        return {"labels": ids, "attention_mask": torch.ones_like(ids), **sample}
