"""One or several streams as one data set without end, whose position a checkpoint keeps.

The k-th sample is a function of rows, shares and seed alone: every rank that reads data passes over all rows and makes
all samples. Where a stream stands is kept in the checkpoint, so that a resumed run passes over rows without tokenising
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from harness.config.values.json_object import JsonObject
from harness.data.batches.order import Indices, OwnOrder, sample_order
from harness.data.mixing.shares import Shares
from harness.data.on_disk.cache import fingerprint
from harness.data.streaming.layouts import Layout, Place, Sample
from harness.data.streaming.rows import Rows
from harness.parallel.generators import seed_of
from harness.resilience.watch.activity import beat

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
