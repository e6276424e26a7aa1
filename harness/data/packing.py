"""Pack samples into blocks without cutting any: best-fit-decreasing (Johnson et al., 1974, SIAM J. Comput. 3(4)).

All samples of one length are placed together, in arrays: a few numbers a sample, no Python object.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """The samples of each block: `indices` [samples], block after block, and `ends` [blocks], where each block ends."""

    indices: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, block: int) -> list[int]:
        if not -len(self) <= block < len(self):
            raise IndexError(f"block {block} of {len(self)}")
        block %= len(self)
        start = self.ends[block - 1] if block else 0
        found: list[int] = self.indices[start : self.ends[block]].tolist()
        return found


def best_fit_decreasing(lengths: npt.ArrayLike, size: int) -> Bins:
    """Pack samples of these lengths (1 to `size` tokens each) into blocks of `size` tokens; a pure function.

    Samples are taken from the longest to the shortest, each into the fullest block that still has room. Within a block
    samples keep their order, and blocks are sorted by their first sample.
    """
    lengths = np.asarray(lengths, dtype=np.int32)
    order = np.argsort(-lengths, kind="stable")
    block_of = np.empty(len(lengths), dtype=np.int32)
    blocks = _Blocks(size)
    placed = 0
    for length, count in zip(*(found[::-1].tolist() for found in np.unique(lengths, return_counts=True)), strict=True):
        end = placed + count
        while placed < end:
            chosen = blocks.fill(length, end - placed)
            block_of[order[placed : placed + len(chosen)]] = chosen
            placed += len(chosen)
    return _in_order(block_of, blocks.count)


class _Blocks:
    """The blocks so far, grouped by free room. Among blocks with equal room the latest is filled first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0
        self._with_room: dict[int, list[npt.NDArray[np.int32]]] = {}
        self._rooms = 0  # bit r is set if some block has room for exactly r tokens: finds the best fit without a search

    def fill(self, length: int, most: int) -> npt.NDArray[np.int32]:
        """Place up to `most` samples of `length` into the fullest blocks with room for one, or into new blocks.

        Returns the block of each sample placed. All these blocks had the same room.
        """
        # The lowest set bit from `length` on is the smallest room that is large enough: the best fit.
        enough = self._rooms >> length
        room = length + (enough & -enough).bit_length() - 1 if enough else self.size
        each = room // length
        wanted = -(-most // each)
        if enough:
            blocks = self._take(room, wanted)
        else:
            blocks = np.arange(self.count, self.count + wanted, dtype=np.int32)
            self.count += wanted
        chosen = np.repeat(blocks, each)[:most]
        in_last = len(chosen) - each * (len(blocks) - 1)  # the last block may get fewer samples, and keeps more room
        self._put(room - each * length, blocks[:-1])
        self._put(room - in_last * length, blocks[-1:])
        return chosen

    def _take(self, room: int, most: int) -> npt.NDArray[np.int32]:
        """Remove and return up to `most` blocks with this room, from the latest group, the latest first."""
        runs = self._with_room[room]
        run = runs.pop()
        if len(run) > most:
            runs.append(run[:-most])
        if not runs:
            self._rooms &= ~(1 << room)
        return run[: -most - 1 : -1]

    def _put(self, room: int, blocks: npt.NDArray[np.int32]) -> None:
        if room and len(blocks):
            self._with_room.setdefault(room, []).append(blocks)
            self._rooms |= 1 << room


def _in_order(block_of: npt.NDArray[np.int32], count: int) -> Bins:
    """Return the samples of each block in their own order, the blocks in the order of their first samples."""
    first = np.empty(count, dtype=np.int32)
    # If an index occurs several times, numpy keeps the last assignment: in reverse order, the first sample.
    first[block_of[::-1]] = np.arange(len(block_of), dtype=np.int32)[::-1]
    number = np.empty(count, dtype=np.int32)
    number[np.argsort(first)] = np.arange(count, dtype=np.int32)
    block_of = number[block_of]
    return Bins(indices=np.argsort(block_of, kind="stable"), ends=np.cumsum(np.bincount(block_of, minlength=count)))
