"""Streams of samples: rows become samples, and one or several streams one endless data set.

The k-th sample is a function of rows, shares and seed alone: every rank that reads data passes over all rows and makes
all samples. A checkpoint keeps where each stream stands, so a resumed run passes over rows without tokenising them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from harness.config.values.json_object import JsonObject
from harness.data.batches.order import Indices, OwnOrder, sample_order
from harness.data.blocks import positions_of
from harness.data.chat import ConversationEncoder, Encoded
from harness.data.files.rows import TEXT
from harness.data.mixing import Shares
from harness.data.on_disk.cache import fingerprint
from harness.data.on_disk.progress import Progress
from harness.data.packing import best_fit_decreasing
from harness.data.pieces import PieceEncoder
from harness.data.samples import laid_out
from harness.data.streaming.rows import Mark, Row, Rows
from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.parallel.generators import seed_of
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


ENDLESS = 1 << 60
"""The length of a stream, which has none."""


class StreamedSource:
    """The samples of one stream, to be read in order.

    Attributes:
        key: what the samples are made of.
    """

    def __init__(self, rows: Rows, layout: Layout, made_with: str = "") -> None:
        self._rows, self._layout = rows, layout
        self._made = fingerprint(made_with, *layout.key)
        self.key = fingerprint(rows.key, self._made)
        self.seek({})

    def __getitem__(self, index: int) -> Sample:
        self._go_to(index)
        return self._next()

    def seek(self, position: JsonObject) -> None:
        """Go on from a position that was kept; from the beginning where it is empty.

        What was left over of a row is of use only to the tokenizer and the sample length that made it.
        """
        numbers = {name: position.get(name, 0) for name in ("sample", "section", "row")}
        is_alike = position.get("made") == self._made
        rest, starts = (np.array(position[name] if is_alike else (), dtype=np.int64) for name in ("rest", "starts"))
        self._start(Place(**numbers, rest=rest, starts=starts, mark=position.get("mark", {})))

    def position(self, sample: int) -> JsonObject:
        """Return where the stream can go on to give this sample: there, or a few samples before."""
        self._go_to(sample)
        place = self._place
        origin = self._origin
        mark = self._rows.mark(place.section, place.row) or (origin.mark if origin.section == place.section else {})
        left_over = {"rest": place.rest.tolist(), "starts": place.starts.tolist(), "made": self._made}
        return {**vars(place), **left_over, "mark": mark, "at": sample}

    def _go_to(self, sample: int) -> None:
        if sample < self._count:  # as after a rollback
            self._start(self._origin)
        while self._count < sample:
            self._next()

    def _start(self, origin: Place) -> None:
        self._origin = self._place = origin
        self._count, self._coming = origin.sample, self._layout(self._rows, origin)

    def _next(self) -> Sample:
        sample, place = next(self._coming)
        self._count, self._place = self._count + 1, place or self._place
        return sample


class Streamed(OwnOrder):
    """One or several streams as one data set without end, by shares where there are several.

    Args:
        weights: of the streams, if there are several.
        buffer: samples that are read at once and shuffled; below 2: they stay in the order of the streams.
    """

    endless = True

    def __init__(self, sources: Sequence[StreamedSource], weights: Sequence[float] = (), buffer: int = 0) -> None:
        self.sources, self._buffer = list(sources), max(buffer, 1)
        self._shares = Shares(weights or [1.0])
        self.key = fingerprint(*(source.key for source in sources), *self._shares.shares, self._buffer)
        self._number = -1  # of the buffer that is held
        self._held: list[Sample] = []
        self._begin: JsonObject = {}  # the position at which it begins

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

    def position(self, consumed: int) -> JsonObject:
        """Return where each source can go on when so many samples were consumed."""
        number = consumed // self._buffer
        if number == self._number:
            return self._begin
        before = self._shares.before(number * self._buffer)
        return {"sources": [source.position(count) for source, count in zip(self.sources, before, strict=True)]}

    def seek(self, position: JsonObject, consumed: int) -> None:
        """Give the samples behind `consumed` ones from a position on that was kept.

        Where there are other sources than then, each begins anew.
        """
        self._number = -1
        number = consumed // self._buffer
        places = position.get("sources", [])
        if len(places) != len(self.sources):
            places = [{"sample": 0, "at": 0}] * len(self.sources)
        counts = self._shares.before(number * self._buffer)
        for source, place, count in zip(self.sources, places, counts, strict=True):
            at = place.get("at", count)  # older versions did not keep for which sample a position was asked
            source.seek({**place, "sample": min(place["sample"] + count - at, count)})

    def _read(self, index: int) -> Sample:
        (number,), (place,) = self._shares.places(index, 1)
        sample = self.sources[number][int(place)]
        if len(self.sources) == 1:
            return sample
        ids = sample["input_ids"]
        return {"labels": ids, "attention_mask": torch.ones_like(ids), **sample}
