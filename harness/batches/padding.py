"""Choose the length that samples are padded to: the longest of a micro-batch, of a step, or of the data set.

Attention is causal and padding is on the right, so no real token attends to padding and its length changes no result.
Three things still need one length for all micro-batches of a step, the same in every layout: pipeline stages exchange
the shape of their activations only once; dropout draws depend on the shape; router losses count padding too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from harness.batches.collate import MapDataset

MULTIPLE = 8  # tensor cores want multiples of 8; fewer distinct shapes mean fewer recompilations


@runtime_checkable
class PaddedSamples(MapDataset, Protocol):
    """A data set that pads its samples and knows their lengths without reading them.

    Attributes:
        block_size: the length in tokens that samples are padded to at present.
        packing: whether several documents share a sample; such samples always keep `block_size`.
    """

    block_size: int
    packing: bool

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the number of tokens of these samples, by default of all, without padding: [samples], or [samples,
        sequences] if a sample has several, which are padded alike."""

    def padded_to(self, length: int) -> Self:
        """Return the same samples padded to `length` tokens; a longer sample must not be read from the result."""


@dataclass(frozen=True)
class Padding:
    """The padded lengths of micro-batches.

    Attributes:
        lengths: padded length of each micro-batch in tokens; None if the data set does not pad.
        tokens: tokens in all micro-batches, including padding; 0 if the data set does not pad.
        padding: number of padding tokens among them.
    """

    lengths: npt.NDArray[np.integer] | None = None
    tokens: int = 0
    padding: int = 0


def padding_of(dataset: MapDataset, batches: npt.NDArray[np.integer], *, one_length: bool) -> Padding:
    """Return the padding of micro-batches given by their rows [micro-batches, samples].

    With `one_length` all micro-batches are padded to the longest sample of all; otherwise each to its own longest.
    """
    if not isinstance(dataset, PaddedSamples):
        return Padding()
    # A sample of several sequences (a preferred and a rejected answer) has a length for each.
    found = dataset.lengths(batches.ravel()).reshape(len(batches), -1)
    longest = np.broadcast_to(found.max() if one_length else found.max(axis=1), len(batches))
    lengths = np.full(len(batches), dataset.block_size) if dataset.packing else _rounded(longest, dataset.block_size)
    tokens = int(lengths.sum()) * found.shape[1]
    return Padding(lengths, tokens, tokens - int(found.sum()))


def at_length(dataset: MapDataset, length: int | None) -> MapDataset:
    """Return the data set with samples padded to `length`; unchanged if it does not pad."""
    return dataset.padded_to(length) if length is not None and isinstance(dataset, PaddedSamples) else dataset


def at_longest(dataset: MapDataset) -> MapDataset:
    """Return the data set with all samples padded to the longest one."""
    if not isinstance(dataset, PaddedSamples) or dataset.packing:
        return dataset
    return dataset.padded_to(int(_rounded(dataset.lengths().max(), dataset.block_size)))


def _rounded(longest: npt.NDArray[np.integer], most: int) -> npt.NDArray[np.int64]:
    return np.minimum(-(-longest.astype(np.int64) // MULTIPLE) * MULTIPLE, most)
