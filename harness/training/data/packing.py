"""Best-fit-decreasing bin packing: samples into blocks, none cut (Johnson et al., 1974, SIAM J. Comput. 3(4))."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the samples in each block of `size`; the same for the same lengths, whatever else happens.

    The longest sample comes first, each into the fullest block that still has room for it. Within a block and
    among blocks the samples' own order is kept. Lengths lie between 1 and `size`.
    """
    blocks: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # free tokens -> blocks that have so many
    rooms = 0  # bit r is set where with_room[r] holds a block
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[index])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            block = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, block = size, len(blocks)
            blocks.append([])
        blocks[block].append(index)
        left = room - length
        if left:
            with_room[left].append(block)
            rooms |= 1 << left
    return sorted(sorted(block) for block in blocks)
