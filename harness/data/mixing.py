"""Combine several data sets of one block size: concatenated, or mixed by shares.

In a mixture, a sample's source, and its index there, are computed from its number in the run alone, so they are the
same in every layout and after every resume. Any stretch of consecutive samples contains each source in its share, to
within a sample or two. Each source has its own shuffled order, and begins a new epoch when it is exhausted.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from harness.batches.collate import MapDataset
from harness.batches.order import Indices, OwnOrder, SeveralSources, sample_order
from harness.batches.padding import PaddedSamples
from harness.data.blocks import Blocks
from harness.data.samples import Samples
from harness.data.shares import Shares
from harness.parallel.generators import seed_of

Source = PaddedSamples


class Joined(SeveralSources):
    """The samples of several sources, concatenated. Text samples, which have no labels, get their ids as labels."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str] = ()) -> None:
        self.sources = list(sources)
        self.names = names
        self.block_size = max(source.block_size for source in sources)
        self.packing = sources[0].packing
        self._ends = np.cumsum([len(source) for source in sources], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        source = self.sources[number]
        sample = cast("Mapping[str, Tensor]", source[index - self._ends[number] + len(source)])
        return {"labels": sample["input_ids"], **sample}

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the number of tokens of these samples, by default of all, without padding: as the sources do."""
        asked = np.arange(len(self)) if rows is None else np.asarray(rows)
        found = np.empty((len(asked), *self.sources[0].lengths([0]).shape[1:]), dtype=np.int64)
        numbers = np.searchsorted(self._ends, asked, side="right")
        for number in np.unique(numbers):
            here = numbers == number
            source = self.sources[number]
            found[here] = source.lengths(asked[here] - self._ends[number] + len(source))
        return found

    def sources_of(self, rows: Sequence[int]) -> list[int]:
        """Return the index of the source of each of these samples."""
        return [bisect_right(self._ends, row) for row in rows]

    def by_source(self) -> dict[str, MapDataset]:
        """Return the samples of each source by its short name; {} for one source."""
        if len(self.names) < 2:
            return {}
        return {name: Joined([source]) for name, source in zip(self.short_names, self.sources, strict=True)}

    def padded_to(self, length: int) -> Self:
        """Return the same samples padded to `length` tokens; a longer sample must not be read from the result."""
        joined = self.with_sources([source.padded_to(length) for source in self.sources])
        joined.block_size = length
        return joined

    def with_sources(self, sources: Sequence[Source]) -> Self:
        """Return a copy with other sources of the same sizes."""
        joined = copy.copy(self)
        joined.sources = list(sources)
        return joined


class Mixture(Joined, OwnOrder):
    """Sources that are mixed by shares, whatever their sizes.

    Attributes:
        shares: one for each source; their sum is 1.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], names: Sequence[str]) -> None:
        super().__init__(sources, names)
        self._mixed = Shares(weights)
        self.shares = self._mixed.shares
        self.key = str(self.shares)

    def order(self, consumed: int, count: int, seed: int) -> Indices:
        """Return the indices [count] of the samples that follow the first `consumed` of the run."""
        numbers, positions = self._mixed.positions(consumed, count)
        found = np.empty(count, dtype=np.int64)
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            size = len(self.sources[number])
            epochs, rows = np.divmod(positions[here], size)
            for epoch in np.unique(epochs):
                drawn = sample_order(size, seed_of("mixture", seed, number), int(epoch), rows[epochs == epoch])
                found[here[epochs == epoch]] = drawn + self._ends[number] - size
        return found


def joined(sources: Sequence[Source], weights: Sequence[float] = (), names: Sequence[str] = ()) -> MapDataset:
    """Combine sources into one data set: mixed if there are weights, else concatenated."""
    if weights:
        return Mixture(sources, weights, names)
    return sources[0] if len(sources) == 1 else Joined(sources, names)


def described(data: MapDataset | None) -> Iterator[str]:
    """Yield a line for the user on each source with a share, or with a summary of its conversations."""
    for number, source in enumerate(data.sources if isinstance(data, Joined) else [data]):
        summary = source.summary if isinstance(source, Samples) else ""
        if isinstance(data, Mixture) and isinstance(source, Blocks | Samples):
            share = f"{data.names[number]} gives {data.shares[number]:.1%} of the samples and has {len(source):,}"
            yield f"{share}: {summary}" if summary else share
        elif summary:
            yield summary
