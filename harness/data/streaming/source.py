"""Make a stream of samples from rows, and combine one or several streams into one endless data set.

Sample k is a function of rows, shares and seed alone. Every rank that reads data reads all rows, makes all samples and
keeps its own. A checkpoint holds the position of each stream, so a resumed run skips rows without tokenising them.
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

from harness.batches.order import Indices, OwnOrder, SeveralSources, sample_order
from harness.batches.stream import fingerprint
from harness.config.values.json_object import JsonObject
from harness.data.on_disk.progress import PreparationProgress
from harness.data.shares import Shares
from harness.data.streaming.iterable import Mark, Row, Rows
from harness.parallel.generators import seed_of
from harness.resilience.process.activity import beat

ENDLESS = 1 << 60
"""Returned as the length of a stream, which has none."""

Sample: TypeAlias = object
"""An input of the collator."""
_ROWS_BETWEEN_BEATS = 64  # skipped rows between two heartbeats; without any, the watchdog would report a hang


def _no_ids() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream: the next sample is made of `rest` and of the rows from `row` of `section` on.

    Attributes:
        sample: number of the next sample.
        rest: ids that were tokenised but are in no sample yet.
        starts: indices in `rest` where documents begin.
        mark: a point at or before `row` from which rows can be read, from `Rows.mark`.
    """

    sample: int = 0
    section: int = 0
    row: int = 0
    rest: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    starts: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    mark: Mark = field(default_factory=dict)


PositionedSamples = Iterator[tuple[Sample, StreamPosition | None]]
"""Samples, each with the position after it; None if the stream can resume only from an earlier position."""


class SampleMaker(ABC):
    """Makes samples from the rows of a stream.

    Attributes:
        key: everything besides the rows that the samples depend on.
    """

    key: tuple[object, ...]

    @abstractmethod
    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Yield the samples from a position on, without end."""


class RowsAsTheyAre(SampleMaker):
    """Each row is a sample."""

    key = ()

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Yield the rows from a position on."""
        for sample, (_, row, following, _) in enumerate(neighbours(rows, origin), origin.sample + 1):
            yield row, StreamPosition(sample, *following)


def neighbours(rows: Rows, origin: StreamPosition) -> Iterator[tuple[Row, Row, tuple[int, int], Row]]:
    """Yield (row before, row, (section, number) of the next row, next row) from a position on.

    The very first row has None before it. If a file has become shorter and the position is past its end, the rows
    continue with the next section.
    """
    before = None
    first = origin.mark.get("row", 0)
    progress = PreparationProgress(max(origin.row - first, 1), "passing over rows", rows.say)
    is_there, last = False, first - 1  # whether the position is reached; if row numbers fall, a section has begun
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
    """The samples of one stream, by number. Cheap in order; an earlier number restarts from the position last set.

    Attributes:
        maker: makes the samples of the rows.
        key: a fingerprint of rows and maker.
    """

    def __init__(self, rows: Rows, maker: SampleMaker, made_with: str = "") -> None:
        self._rows = rows
        self.maker = maker
        self._made = fingerprint(made_with, *maker.key)
        self.key = fingerprint(rows.key, self._made)
        self.seek({})

    def __getitem__(self, index: int) -> Sample:
        self._go_to(index)
        return self._next()

    def seek(self, kept: JsonObject) -> None:
        """Continue from a result of `position`; from the beginning if it is {}."""
        numbers = {name: kept.get(name, 0) for name in ("sample", "section", "row")}
        # If tokenizer or sample length have changed, drop the left-over ids: they may be ids of another vocabulary.
        is_alike = kept.get("made") == self._made
        rest, starts = (np.array(kept[name] if is_alike else (), dtype=np.int64) for name in ("rest", "starts"))
        mark = kept.get("mark", {})
        if mark.get("row", 0) >= numbers["row"]:  # it was for the section's end; then the same file began once more
            mark = {}
        self._start(StreamPosition(**numbers, rest=rest, starts=starts, mark=mark))

    def position(self, sample: int) -> JsonObject:
        """Return a position as JSON from which the stream reaches this sample: its own, or one a few samples before."""
        self._go_to(sample)
        found, origin = self._position, self._origin
        mark = self._rows.mark(found.section, found.row) or (origin.mark if origin.section == found.section else {})
        left_over = {"rest": found.rest.tolist(), "starts": found.starts.tolist(), "made": self._made}
        return {**vars(found), **left_over, "mark": mark, "at": sample}

    def _go_to(self, sample: int) -> None:
        if sample < self._count:  # after a rollback
            self._start(self._origin)
        while self._count < sample:
            self._next()

    def _start(self, origin: StreamPosition) -> None:
        self._origin = self._position = origin
        self._count = origin.sample
        self._coming = self.maker.samples(self._rows, origin)

    def _next(self) -> Sample:
        sample, position = next(self._coming)
        self._count = self._count + 1
        self._position = position or self._position
        return sample


def samples_of_rows(rows: Rows, buffer: int) -> Streamed:
    """Return a stream whose rows are the samples, shuffled within a buffer of that many."""
    return Streamed([StreamedSource(rows, RowsAsTheyAre())], buffer=buffer)


class Streamed(OwnOrder, SeveralSources):
    """One or several streams as one endless data set; several are mixed by shares.

    Args:
        weights: one for each stream, if there are several.
        names: one for each stream, for messages and metrics.
        buffer: number of samples that are read at once and shuffled; below 2, samples keep the order of the streams.
    """

    endless = True

    def __init__(
        self,
        sources: Sequence[StreamedSource],
        weights: Sequence[float] = (),
        buffer: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self.sources = list(sources)
        self._buffer = max(buffer, 1)
        self.names = names
        self._shares = Shares(weights or [1.0])
        self.key = fingerprint(*(source.key for source in sources), *self._shares.shares, self._buffer)
        self._number = -1  # number of the buffer in memory
        self._held: list[Sample] = []
        self._begin: JsonObject = {}  # position of the buffer's first sample

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Sample:
        if self._buffer == 1:
            return self._read(index)
        number, inside = divmod(index, self._buffer)
        if number != self._number:
            self._number = -1
            self._held = []
            self._begin = self.position(number * self._buffer)
            for position in range(number * self._buffer, (number + 1) * self._buffer):
                beat("reading data")
                self._held.append(self._read(position))
            self._number = number
        return self._held[inside]

    def order(self, consumed: int, count: int, seed: int) -> Indices:
        """Return the indices [count] of the samples that follow the first `consumed`, shuffled within each buffer."""
        positions = np.arange(consumed, consumed + count)
        if self._buffer == 1:
            return positions
        numbers, inside = np.divmod(positions, self._buffer)
        for number in np.unique(numbers).tolist():
            drawn = sample_order(self._buffer, seed_of("buffer", seed), number, inside[numbers == number])
            positions[numbers == number] = number * self._buffer + drawn
        return positions

    def sources_of(self, rows: Sequence[int]) -> list[int]:
        """Return the index of the source of each of these samples."""
        return [int(self._shares.positions(row, 1)[0][0]) for row in rows]

    def position(self, consumed: int) -> JsonObject:
        """Return the position of each source after `consumed` samples, as JSON for a checkpoint."""
        number = consumed // self._buffer
        if number == self._number:
            return self._begin
        before = self._shares.before(number * self._buffer)
        return {"sources": [source.position(count) for source, count in zip(self.sources, before, strict=True)]}

    def seek(self, position: JsonObject, consumed: int) -> None:
        """Continue after `consumed` samples, from a result of `position`.

        If the number of sources has changed since, each begins anew.
        """
        self._number = -1
        number = consumed // self._buffer
        positions = position.get("sources", [])
        if len(positions) != len(self.sources):
            positions = [{"sample": 0, "at": 0}] * len(self.sources)
        counts = self._shares.before(number * self._buffer)
        for source, kept, count in zip(self.sources, positions, counts, strict=True):
            source.seek({**kept, "sample": min(kept["sample"] + count - kept["at"], count)})

    def _read(self, index: int) -> Sample:
        (number,), (position,) = self._shares.positions(index, 1)
        sample = self.sources[number][int(position)]
        if len(self.sources) == 1:
            return sample
        ids = sample["input_ids"]
        return {"labels": ids, "attention_mask": torch.ones_like(ids), **sample}
