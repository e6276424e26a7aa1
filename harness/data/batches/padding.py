"""Choose the length that samples are padded to: the longest of a micro-batch, of a step, or of the data set.

No token that counts attends to padding on its right, so its length changes no result. Three things need one length for
all micro-batches of a step: pipeline stages, which exchange the shape of their activations once; random draws, whose
shape decides what is drawn; and router losses, which count padding too. Then it is the same in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from harness.data.batches.collate import MapDataset

MULTIPLE = 8  # suits matrix units, and makes fewer shapes for caches by shape


@runtime_checkable
class PaddedSamples(MapDataset, Protocol):
    """A data set that pads its samples, and knows how long they are without reading them.

    Attributes:
        block_size: the length that all samples have as they are.
        packing: whether they keep it, as several documents share a sample.
    """

    block_size: int
    packing: bool

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the tokens of these samples, by default of all, without padding."""

    def padded_to(self, length: int) -> Self:
        """Return the same samples at another length; only those that are not longer may be read."""


@dataclass(frozen=True)
class Padding:
    """What micro-batches are padded to.

    Attributes:
        lengths: of each micro-batch; None where the data set pads nothing.
        tokens: how many there are in all micro-batches, padding included; 0 where the data set pads nothing.
        padding: how many of them are padding.
    """

    lengths: npt.NDArray[np.integer] | None = None
    tokens: int = 0
    padding: int = 0


def padding_of(dataset: MapDataset, batches: npt.NDArray[np.integer], *, one_length: bool) -> Padding:
    """Return how micro-batches of these rows [micro-batch, row] are padded; `one_length`: all alike."""
    if not isinstance(dataset, PaddedSamples):
        return Padding()
    found = dataset.lengths(batches.ravel()).reshape(batches.shape)
    longest = np.broadcast_to(found.max() if one_length else found.max(axis=1), len(batches))
    lengths = np.full(len(batches), dataset.block_size) if dataset.packing else _rounded(longest, dataset.block_size)
    tokens = int(lengths.sum()) * batches.shape[1]
    return Padding(lengths, tokens, tokens - int(found.sum()))


def at_length(dataset: MapDataset, length: int | None) -> MapDataset:
    """Return the data set with its samples padded to `length`, if it pads them."""
    return dataset.padded_to(length) if length is not None and isinstance(dataset, PaddedSamples) else dataset


def at_longest(dataset: MapDataset) -> MapDataset:
    """Return the data set with its samples padded to the longest of all."""
    if not isinstance(dataset, PaddedSamples) or dataset.packing:
        return dataset
    return dataset.padded_to(int(_rounded(dataset.lengths().max(), dataset.block_size)))


def _rounded(longest: npt.NDArray[np.integer], most: int) -> npt.NDArray[np.int64]:
    return np.minimum(-(-longest.astype(np.int64) // MULTIPLE) * MULTIPLE, most)
