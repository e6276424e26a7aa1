"""Sums, joins and shares of CPU tensors over ranks of one host.

A rank copies its tensor into memory that all read, tells the others, waits for them, and reads theirs. Two buffers in
turn make one meeting a piece enough: who is told of the next piece knows that the last one was read. Sums are made in
the order of the ranks, so all ranks get the same bits, in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from harness.parallel.collectives.neighbours import Neighbours, meet

PIECE_BYTES = 1 << 22
"""What a rank writes before it waits: of half of it, a meeting would take a tenth of the time."""
_WHOLE_BYTES = 1 << 16
"""Of a tensor that each rank sums by itself, however many they are: a second meeting would take longer."""
Operation = Callable[..., Tensor]


class HostMemory:
    """The memory that the ranks of one group share. All of them call the same functions in the same order, with
    tensors of one shape and dtype."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._turn = 0

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout: timedelta) -> HostMemory | None:
        """Return the memory of `group`; None, on all its ranks, where they cannot share any. All of them call it."""
        neighbours = meet(group, 2 * PIECE_BYTES, timeout)
        return None if neighbours is None else cls(neighbours)

    def close(self) -> None:
        """Leave the others."""
        self._neighbours.close()

    def all_reduce(self, x: Tensor, operation: Operation = torch.add, out: Tensor | None = None) -> Tensor:
        """Return the sum of `x` over the ranks, or `torch.maximum`; in `out`, contiguous, which may be `x`."""
        x = x.detach().contiguous()
        total = torch.empty_like(x) if out is None else out
        numbers = max(PIECE_BYTES // x.element_size(), 1)
        for piece, into in zip(x.view(-1).split(numbers), total.view(-1).split(numbers), strict=True):
            shares = self._exchange(piece)
            if len(shares) > 2 and _bytes(piece) > _WHOLE_BYTES:
                shares = [self._reduced_in_shares(shares, operation, _bytes(piece))]
            if len(shares) == 1:
                into.copy_(shares[0])
            else:
                _reduce(shares, operation, into)
        return total

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tensors of all ranks, in their order, along a new first dimension; in `out`, contiguous, of which
        `x` may be this rank's part."""
        x = x.detach().contiguous()
        whole = x.new_empty((self._neighbours.size, *x.shape)) if out is None else out
        numbers = max(PIECE_BYTES // x.element_size(), 1)
        into = whole.view(self._neighbours.size, -1).split(numbers, dim=1)
        for piece, places in zip(x.view(-1).split(numbers), into, strict=True):
            for share, place in zip(self._exchange(piece), places, strict=True):
                if place.data_ptr() != piece.data_ptr():
                    place.copy_(share)
        return whole

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's share, along the first dimension, of the sum of `x` over the ranks; in `out`, contiguous,
        which may be that share of `x`."""
        ranks = self._neighbours.size
        rows = x.detach().reshape(ranks, -1)
        own = x.new_empty((x.shape[0] // ranks, *x.shape[1:])) if out is None else out
        numbers = max(PIECE_BYTES // (x.element_size() * ranks), 1)
        for piece, into in zip(rows.split(numbers, dim=1), own.view(-1).split(numbers), strict=True):
            shares = self._exchange(piece)
            _reduce([share[self._neighbours.rank] for share in shares], torch.add, into)
        return own

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Return the pieces of all ranks, where this rank may read them until the next call but one."""
        size, start = _bytes(piece), self._turn * PIECE_BYTES
        shares = [
            memory[start : start + size].view(piece.dtype).view(piece.shape) for memory in self._neighbours.memory
        ]
        self._turn = 1 - self._turn  # another rank may still read what this one wrote last
        shares[self._neighbours.rank].copy_(piece)
        self._neighbours.wait_for_ranks(size)
        return shares

    def _reduced_in_shares(self, pieces: list[Tensor], operation: Operation, size: int) -> Tensor:
        """Return the sum of the pieces, a share of which each rank has made."""
        rank, ranks = self._neighbours.rank, self._neighbours.size
        shares = [piece.tensor_split(ranks) for piece in pieces]
        of_rank = [share[rank] for share in shares]
        own = torch.empty_like(of_rank[rank])
        _reduce(of_rank, operation, own)
        of_rank[rank].copy_(own)
        self._neighbours.wait_for_ranks(size)
        return torch.cat([share[index] for index, share in enumerate(shares)])


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _reduce(pieces: Sequence[Tensor], operation: Operation, into: Tensor) -> None:
    """Combine the pieces in their order."""
    operation(pieces[0], pieces[1], out=into)
    for piece in pieces[2:]:
        operation(into, piece, out=into)
