"""Which samples come when: pure arithmetic on (seed, samples consumed), the same for every layout.

Epoch e passes through a permutation of its own, and a global batch may end one epoch and begin the next, so
no sample is ever dropped. A permutation is the sorting order of 64-bit keys from the Philox counter generator
(Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): numpy promises the bits of a bit
generator for good, but not those of `Generator.permutation`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_WORD = 2**64 - 1


def sample_order(n: int, seed: int, epoch: int) -> Indices:
    """The permutation of `range(n)` that epoch number `epoch` (from 0) follows, equal on every machine."""
    key = (seed & _WORD) | (epoch & _WORD) << 64
    return np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable").astype(np.int64)


def batch_indices(
    consumed: int, count: int, n: int, seed: int, order: Callable[[int, int, int], Indices] = sample_order
) -> Indices:
    """The `count` samples, of a data set of `n`, that follow the first `consumed`, over any end of an epoch.

    `order` is called as `sample_order(n, seed, epoch)`; a caller that keeps permutations passes its own.
    """
    pieces = []
    while count > 0:
        epoch, position = divmod(consumed, n)
        piece = order(n, seed, epoch)[position : position + count]
        pieces.append(piece)
        consumed += len(piece)
        count -= len(piece)
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
