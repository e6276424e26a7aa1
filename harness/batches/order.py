"""Compute the order of samples from (seed, consumed samples) alone, the same in every layout.

Each epoch has its own permutation. A global batch may span the end of one epoch and the start of the next, so no
sample is dropped. A permutation is never stored: each entry is computed on its own, in constant memory and time for
any number of samples.

The permutation is a Feistel network on a rectangle of `rows` x `columns` cells that just covers the n samples, as for
ciphers on arbitrary finite domains (Black and Rogaway, 2002). Each round shifts the row by a hash of the column, then
the column by a hash of the row. A round can be undone, so the network is a bijection of the rectangle. If a cell lies
outside the n samples, the network is applied again until it lies inside ("cycle walking"); the result is a bijection
of the samples. The round keys come from the Philox counter generator (Salmon et al., 2011, "Parallel random numbers:
as easy as 1, 2, 3"), whose output numpy guarantees across versions; the hash is SplitMix64's (Steele et al., 2014,
"Fast splittable pseudorandom number generators"). All arithmetic is modulo 2^64, so every machine gets the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from math import isqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.batches.collate import MapDataset
from harness.config.values.json_object import JsonObject

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_WORD = 2**64 - 1

# With fewer than 16 rounds, some permutations of 5 or 6 samples are more frequent than others.
_ROUNDS = 24
_SPLIT_MIX = tuple(map(np.uint64, (30, 27, 31, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))  # shifts, multipliers


class OwnOrder(ABC):
    """A data set that decides the order of its samples itself.

    Attributes:
        key: identifies the order, for comparison between ranks and runs.
        endless: whether it is a stream; its `len` then means nothing.
    """

    key: str
    endless: bool = False

    @abstractmethod
    def order(self, consumed: int, count: int, seed: int) -> Indices:
        """Return the indices [count] of the samples that follow the first `consumed` of the run."""

    def position(self, consumed: int) -> JsonObject:  # noqa: ARG002
        """Return the position after `consumed` samples for a checkpoint; {} if their number is enough."""
        return {}

    def seek(self, position: JsonObject, consumed: int) -> None:  # noqa: B027  # only a stream has something to do
        """Continue after `consumed` samples, from a result of `position`."""


class SeveralSources(ABC):
    """A data set with samples from one or several sources.

    Attributes:
        names: names of the sources in messages and metrics; empty if they are unnamed.
    """

    names: Sequence[str]

    @abstractmethod
    def sources_of(self, rows: Sequence[int]) -> list[int]:
        """Return, for each of these sample indices, the index of its source in `names`."""

    def by_source(self) -> Mapping[str, MapDataset]:
        """Return short name of a source -> its samples; {} for a single source and for a stream."""
        return {}

    @property
    def short_names(self) -> list[str]:
        """File names without folder and suffix, made unique by a number."""
        taken: list[str] = []
        for name in self.names:
            short = Path(name).stem or "source"
            free = (f"{short}{number}" for number in count(2))
            taken.append(short if short not in taken else next(each for each in free if each not in taken))
        return taken


def sample_order(n: int, seed: int, epoch: int, positions: npt.ArrayLike | None = None) -> Indices:
    """Return an epoch's permutation of `range(n)` at these positions, by default at all n; epochs count from 0.

    Memory and time grow with the number of positions, not with n.
    """
    walked = np.array(np.arange(n) if positions is None else positions, dtype=np.uint64)
    # A nearly square rectangle that just covers n cells, with an even number of rows: if both sides were odd, every
    # shift would be an even permutation, and half of all permutations could never occur.
    sides = 2 * (isqrt(max(n - 1, 0)) // 2 + 1)
    rows = np.uint64(sides)
    columns = np.uint64(-(-n // sides))
    keys = np.random.Philox(key=(seed & _WORD) | (epoch & _WORD) << 64).random_raw(_ROUNDS)
    # The rectangle is hardly larger than n, so only a few cells must be walked again, and the loop ends soon.
    outside = np.arange(len(walked))
    while len(outside):
        moved = _shuffle(walked[outside], keys, rows, columns)
        walked[outside] = moved
        outside = outside[moved >= n]
    return walked.astype(np.int64)


def batch_indices(consumed: int, count: int, n: int, seed: int) -> Indices:
    """Return the indices [count] of the samples that follow the first `consumed`, across ends of epochs.

    `n` is the size of the data set.
    """
    pieces = [np.empty(0, dtype=np.int64)]
    while count > 0:
        epoch, start = divmod(consumed, n)
        stop = min(start + count, n)
        pieces.append(sample_order(n, seed, epoch, np.arange(start, stop)))
        consumed += stop - start
        count -= stop - start
    return np.concatenate(pieces)


def _shuffle(positions: _Words, keys: _Words, rows: np.uint64, columns: np.uint64) -> _Words:
    """Apply the network once to cells of the rectangle, numbered row by row."""
    row, column = np.divmod(positions, columns)
    for of_column, of_row in keys.reshape(-1, 2):
        row = (row + _hashed(column + of_column) % rows) % rows
        column = (column + _hashed(row + of_row) % columns) % columns
    return row * columns + column


def _hashed(words: _Words) -> _Words:
    """Return SplitMix64's hash of each word."""
    first, second, third, multiplier, other = _SPLIT_MIX
    # On arrays of uint64, numpy multiplies modulo 2^64 without a warning.
    words = (words ^ (words >> first)) * multiplier
    words = (words ^ (words >> second)) * other
    return words ^ (words >> third)
