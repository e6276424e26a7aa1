"""Several data sets of one block size as one: one behind the other, or mixed by shares.

In a mixture the number of a sample in the run decides by arithmetic alone which source it comes from and which of its
samples it is, in every layout and after every resume. Any run of samples holds each source in its share, to within a
sample or two. Each source is passed through in an order of its own, and again when it is through.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from harness.data.batches.collate import MapDataset
from harness.data.batches.order import Indices, OwnOrder, SeveralSources, sample_order
from harness.data.blocks import Blocks
from harness.data.samples import Samples
from harness.parallel.generators import seed_of

PERIOD = 1 << 16  # samples after which the pattern of sources repeats; shares are multiples of its inverse


class Shares:
    """The order in which samples are taken from several sources: each source in its share, to within a sample or two.

    Attributes:
        shares: of the sources; their sum is 1.
        slots: of each source, its samples in a period.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = [weight / sum(weights) for weight in weights]
        self.slots = np.array(_slots(self.shares))
        # spread evenly over the period: the i-th of a source's c slots is due at (i + 1/2) / c of it
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in self.slots])
        number = np.repeat(np.arange(len(weights)), self.slots)
        self._pattern = number[np.lexsort((number, due))]
        self._rank = np.empty(PERIOD, dtype=np.int64)
        for source, slots in enumerate(self.slots):
            self._rank[self._pattern == source] = np.arange(slots)

    def places(self, consumed: int, count: int) -> tuple[Indices, Indices]:
        """Return source, and number in it, of each of the `count` samples that follow the first `consumed`."""
        period, slot = np.divmod(np.arange(consumed, consumed + count, dtype=np.int64), PERIOD)
        numbers = self._pattern[slot]
        return numbers, period * self.slots[numbers] + self._rank[slot]

    def before(self, consumed: int) -> list[int]:
        """Return how many of the first `consumed` samples come from each source."""
        periods, slot = divmod(consumed, PERIOD)
        counts: list[int] = (
            periods * self.slots + np.bincount(self._pattern[:slot], minlength=len(self.slots))
        ).tolist()
        return counts


def _slots(shares: Sequence[float]) -> list[int]:
    """Return how many samples of a period each source gives: largest remainders, but at least one."""
    exact = [share * PERIOD for share in shares]
    slots = [max(int(each), 1) for each in exact]
    nearest = sorted(range(len(shares)), key=lambda i: (slots[i] - exact[i], i))
    for i in nearest[: max(PERIOD - sum(slots), 0)]:
        slots[i] += 1
    slots[slots.index(max(slots))] += PERIOD - sum(slots)
    return slots


Source = Blocks | Samples


class Joined(SeveralSources):
    """The samples of several sources, one source behind the other; of text the labels are its ids."""

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
        sample = source[index - self._ends[number] + len(source)]
        return {"labels": sample["input_ids"], **sample}

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the tokens of these samples, by default of all, without padding."""
        asked = np.arange(len(self)) if rows is None else np.asarray(rows)
        found = np.empty(len(asked), dtype=np.int64)
        numbers = np.searchsorted(self._ends, asked, side="right")
        for number in np.unique(numbers):
            here, source = numbers == number, self.sources[number]
            found[here] = source.lengths(asked[here] - self._ends[number] + len(source))
        return found

    def sources_of(self, rows: Sequence[int]) -> list[int]:
        """Return the number of the source of each of these samples."""
        return [bisect_right(self._ends, row) for row in rows]

    def padded_to(self, length: int) -> Joined:
        """Return the same samples at another length; only those that are not longer may be read."""
        joined = Joined([source.padded_to(length) for source in self.sources], self.names)
        joined.block_size = length
        return joined


class Mixture(Joined, OwnOrder):
    """Sources of which each gives its share of the samples, whatever its size.

    Attributes:
        shares: of the sources; their sum is 1.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], names: Sequence[str]) -> None:
        super().__init__(sources, names)
        self._mixed = Shares(weights)
        self.shares = self._mixed.shares
        self.key = str(self.shares)

    def order(self, consumed: int, count: int, seed: int) -> Indices:
        """Return the `count` samples that follow the first `consumed` of the run."""
        numbers, places = self._mixed.places(consumed, count)
        found = np.empty(count, dtype=np.int64)
        for number in np.unique(numbers):
            here, size = np.flatnonzero(numbers == number), len(self.sources[number])
            epochs, rows = np.divmod(places[here], size)
            for epoch in np.unique(epochs):
                drawn = sample_order(size, seed_of("mixture", seed, number), int(epoch), rows[epochs == epoch])
                found[here[epochs == epoch]] = drawn + self._ends[number] - size
        return found


def joined(sources: Sequence[Source], weights: Sequence[float] = (), names: Sequence[str] = ()) -> MapDataset:
    """Return several sources as one data set, by weights if there are any."""
    if weights:
        return Mixture(sources, weights, names)
    return sources[0] if len(sources) == 1 else Joined(sources, names)


def described(data: MapDataset | None) -> Iterator[str]:
    """Give a line for each source that has a share or a summary of what became of its conversations."""
    for number, source in enumerate(data.sources if isinstance(data, Joined) else [data]):
        summary = source.summary if isinstance(source, Samples) else ""
        if isinstance(data, Mixture) and isinstance(source, Blocks | Samples):
            share = f"{data.names[number]} gives {data.shares[number]:.1%} of the samples and has {len(source):,}"
            yield f"{share}: {summary}" if summary else share
        elif summary:
            yield summary


def parts_of(data: MapDataset) -> dict[str, MapDataset]:
    """Return the sources of a data set by their file names; nothing if there is only one source."""
    if not isinstance(data, Joined) or len(data.names) < 2:
        return {}
    return {name: Joined([source]) for name, source in zip(data.short_names, data.sources, strict=True)}
