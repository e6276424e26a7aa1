"""Which samples come when: pure arithmetic on (seed, samples consumed), the same for every layout.

Epoch e passes through a permutation of its own, and a global batch may end one epoch and begin the next, so no sample
is ever dropped. A permutation is never held: each place in it is computed by itself, in constant memory and time,
however many samples there are.

It is a Feistel network over the places of a rectangle, as for ciphers on arbitrary finite domains (Black and Rogaway,
2002): `rows` x `columns` just covers the n samples. Round after round moves the row by a hash of the column, then the
column by a hash of the row. Each round can be undone, so the network is a bijection of the rectangle. Of the few
places that lie outside the n samples, the network is applied once more until they lie inside: that makes it a
bijection of the samples. The keys of the rounds come from the Philox counter generator (Salmon et al., 2011,
"Parallel random numbers: as easy as 1, 2, 3"), whose bits numpy promises for good; the hash is that of SplitMix64
(Steele et al., 2014, "Fast splittable pseudorandom number generators"). All of it is arithmetic modulo 2^64, so that
every machine computes the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from math import isqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_WORD = 2**64 - 1

# With fewer than 16 some of the permutations of 5 or 6 samples come more often than others.
_ROUNDS = 24
_SPLIT_MIX = tuple(map(np.uint64, (30, 27, 31, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))  # shifts, multipliers


class OwnOrder(ABC):
    """A data set whose samples have an order of their own.

    Attributes:
        key: what the order is made of.
        endless: whether its length means nothing.
    """

    key: str
    endless: bool = False

    @abstractmethod
    def order(self, consumed: int, count: int, seed: int) -> Indices:
        """Return the `count` samples that follow the first `consumed` of the run."""


class SeveralSources(ABC):
    """A data set whose samples come from one or several sources.

    Attributes:
        names: of the sources, for the user; empty where they have none.
    """

    names: Sequence[str]

    @abstractmethod
    def sources_of(self, rows: Sequence[int]) -> list[int]:
        """Return the number of the source of each of these samples."""

    @property
    def short_names(self) -> list[str]:
        """The names of files alone, each once."""
        taken: list[str] = []
        for name in self.names:
            short = Path(name).stem or "source"
            free = (f"{short}{number}" for number in count(2))
            taken.append(short if short not in taken else next(each for each in free if each not in taken))
        return taken


def sample_order(n: int, seed: int, epoch: int, places: npt.ArrayLike | None = None) -> Indices:
    """Return the samples, of `range(n)`, at these places of epoch number `epoch` (from 0): by default at all n.

    Each place is computed by itself: memory and time grow with the number of places, not with n.
    """
    walked = np.array(np.arange(n) if places is None else places, dtype=np.uint64)
    rows, columns = _rectangle(n)
    keys = np.random.Philox(key=(seed & _WORD) | (epoch & _WORD) << 64).random_raw(_ROUNDS)
    outside = np.arange(len(walked))
    while len(outside):
        moved = _shuffle(walked[outside], keys, rows, columns)
        walked[outside] = moved
        outside = outside[moved >= n]
    return walked.astype(np.int64)


def batch_indices(consumed: int, count: int, n: int, seed: int) -> Indices:
    """Return the `count` samples, of a data set of `n`, that follow the first `consumed`, over any end of an epoch."""
    pieces = [np.empty(0, dtype=np.int64)]
    while count > 0:
        epoch, start = divmod(consumed, n)
        stop = min(start + count, n)
        pieces.append(sample_order(n, seed, epoch, np.arange(start, stop)))
        consumed += stop - start
        count -= stop - start
    return np.concatenate(pieces)


def _rectangle(n: int) -> tuple[np.uint64, np.uint64]:
    """Return rows and columns with the least room for n places that is nearly square.

    The rows are even in number: a shift of an odd number of rows is an even permutation, and so every permutation of
    an odd square would be.
    """
    rows = 2 * (isqrt(max(n - 1, 0)) // 2 + 1)
    return np.uint64(rows), np.uint64(-(-n // rows))


def _shuffle(places: _Words, keys: _Words, rows: np.uint64, columns: np.uint64) -> _Words:
    """Apply the network once to places of the rectangle, counted row by row."""
    row, column = np.divmod(places, columns)
    for of_column, of_row in keys.reshape(-1, 2):
        row = (row + _hashed(column + of_column) % rows) % rows
        column = (column + _hashed(row + of_row) % columns) % columns
    return row * columns + column


def _hashed(words: _Words) -> _Words:
    """Return SplitMix64's hash of each word."""
    first, second, third, multiplier, other = _SPLIT_MIX
    words = (words ^ (words >> first)) * multiplier
    words = (words ^ (words >> second)) * other
    return words ^ (words >> third)
