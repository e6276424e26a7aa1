"""Several tensors in equal parts, one for each rank, walked through in pieces that fit into a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Piece = list[tuple[int, range]]
"""Of which tensors a piece holds something, and which elements of a part; one after the other."""


class Parts:
    """The parts of tensors that are contiguous and of one dtype.

    A tensor's parts are runs of its elements, one after the other; each has as many, rounded up, but the last ones may
    have fewer, or none, and are read as if zeros followed.

    Attributes:
        sizes: elements of a part of each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], count: int) -> None:
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self.sizes = [-(-len(flat) // count) for flat in self._flat]

    def pieces(self, numbers: int) -> Iterator[Piece]:
        """Divide a part of all tensors into pieces of so many elements; the last may be smaller."""
        piece: Piece = []
        room = numbers
        for index, size in enumerate(self.sizes):
            start = 0
            while start < size:
                run = range(start, min(size, start + room))
                piece.append((index, run))
                start, room = run.stop, room - len(run)
                if not room:
                    yield piece
                    piece, room = [], numbers
        if piece:
            yield piece

    def copy(self, part: int, piece: Piece, out: Tensor) -> Tensor:
        """Copy a piece of a part into `out`, which is returned."""
        return torch.cat([self._run(part, index, run) for index, run in piece], out=out)

    def split(self, part: int, whole: Tensor) -> list[Tensor]:
        """Return what a part holds of each tensor, from what the part holds of all."""
        return [
            each[: max(0, len(flat) - part * size)]
            for each, flat, size in zip(whole.split(self.sizes), self._flat, self.sizes, strict=True)
        ]

    def _run(self, part: int, index: int, run: range) -> Tensor:
        size = self.sizes[index]
        found = self._flat[index][part * size : (part + 1) * size][run.start : run.stop]
        return found if len(found) == len(run) else functional.pad(found, (0, len(run) - len(found)))


def width(piece: Piece) -> int:
    """Return the elements of a piece."""
    return sum(len(run) for _, run in piece)
