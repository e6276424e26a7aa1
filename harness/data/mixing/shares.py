"""Shares of several sources in one run of samples: which source the k-th sample comes from, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.data.batches.order import Indices

PERIOD = 1 << 16  # samples after which the sources follow each other as before; shares are multiples of its inverse


class Shares:
    """How sources follow each other. Any run of samples holds each source in its share, to within a sample or two.

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
        for source, count in enumerate(self.slots):
            self._rank[self._pattern == source] = np.arange(count)

    def places(self, consumed: int, count: int) -> tuple[Indices, Indices]:
        """Return source and number in it of each of `count` samples after the first `consumed`."""
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
    """Return how many samples of a period each source gives: at least one, by largest remainders."""
    exact = [share * PERIOD for share in shares]
    slots = [max(int(each), 1) for each in exact]
    nearest = sorted(range(len(shares)), key=lambda i: (slots[i] - exact[i], i))
    for i in nearest[: max(PERIOD - sum(slots), 0)]:
        slots[i] += 1
    slots[slots.index(max(slots))] += PERIOD - sum(slots)
    return slots
