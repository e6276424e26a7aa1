"""From which of several sources each sample is taken, if each gives its share of the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.batches.order import Indices

PERIOD = 1 << 16  # samples after which the pattern of sources repeats, so shares are rounded to 1 / 65,536


class Shares:
    """The sequence of sources that samples are taken from, each by its share to within a sample or two.

    Attributes:
        shares: one for each source; their sum is 1.
        slots: number of samples of each source in a period.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = [weight / sum(weights) for weight in weights]
        self.slots = np.array(_slots(self.shares))
        # Spread evenly: sample i of a source with c slots in a period is due at (i + 1/2) / c of the period.
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in self.slots])
        number = np.repeat(np.arange(len(weights)), self.slots)
        self._pattern = number[np.lexsort((number, due))]
        # For each position of the pattern: how many samples of the same source precede it in the period.
        self._rank = np.empty(PERIOD, dtype=np.int64)
        for source, slots in enumerate(self.slots):
            self._rank[self._pattern == source] = np.arange(slots)

    def positions(self, consumed: int, count: int) -> tuple[Indices, Indices]:
        """Return the source, and the number of the sample in it, of the `count` samples after the first `consumed`.

        Two arrays int64 [count].
        """
        period, slot = np.divmod(np.arange(consumed, consumed + count, dtype=np.int64), PERIOD)
        numbers = self._pattern[slot]
        return numbers, period * self.slots[numbers] + self._rank[slot]

    def before(self, consumed: int) -> list[int]:
        """Return how many of the first `consumed` samples come from each source, one number a source."""
        periods, slot = divmod(consumed, PERIOD)
        counts: list[int] = (
            periods * self.slots + np.bincount(self._pattern[:slot], minlength=len(self.slots))
        ).tolist()
        return counts


def _slots(shares: Sequence[float]) -> list[int]:
    """Return the number of samples of each source in a period: by largest remainders, at least one each."""
    exact = [share * PERIOD for share in shares]
    slots = [max(int(each), 1) for each in exact]
    nearest = sorted(range(len(shares)), key=lambda i: (slots[i] - exact[i], i))
    for i in nearest[: max(PERIOD - sum(slots), 0)]:
        slots[i] += 1
    # Raising every source to at least one slot may exceed the period: the largest source gives up the surplus.
    slots[slots.index(max(slots))] += PERIOD - sum(slots)
    return slots
