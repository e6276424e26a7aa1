"""All-reduce, all-gather, reduce-scatter and all-to-all of CPU tensors over ranks of one host.

A rank copies a chunk of its tensor into memory that all ranks can read, tells the others, waits for them, and reads
theirs. Two buffers are used in turn, so one synchronisation per chunk suffices: a rank that announces the next chunk
has read the last one. Sums are made in the order of the ranks, so all ranks get the same bits, in every run.

`start_...` functions copy and announce the first chunk; the rest is done when the result is asked for, or before the
next call, so that the calls of a group keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from harness.extras.peers import Peers, meet

Piece = list[tuple[int, range]]
"""The elements of a part that fit into one buffer: for each tensor, its index and a range within its part."""
PIECE_BYTES = 1 << 22
"""Chunk size in bytes. At half of it, synchronisation costs 10% of the time."""
_WHOLE_BYTES = 1 << 16
"""Up to this many bytes each rank sums the whole tensor by itself: a second synchronisation would take longer."""
Operation = Callable[..., Tensor]
Combine = Callable[[list[Tensor], Tensor], None]


class EqualShares:
    """Divides contiguous tensors of one dtype into equal parts, one for each rank, as ZeRO-3 does.

    A part is a run of consecutive elements. If the ranks do not divide a tensor, the last parts have fewer elements or
    none, and are padded with zeros.

    Attributes:
        sizes: number of elements in a part, for each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], count: int) -> None:
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self.sizes = [-(-len(flat) // count) for flat in self._flat]

    def pieces(self, numbers: int) -> Iterator[Piece]:
        """Divide a part of all tensors into pieces of `numbers` elements; the last may be smaller."""
        piece: Piece = []
        room = numbers
        for index, size in enumerate(self.sizes):
            start = 0
            while start < size:
                run = range(start, min(size, start + room))
                piece.append((index, run))
                start = run.stop
                room -= len(run)
                if not room:
                    yield piece
                    piece, room = [], numbers
        if piece:
            yield piece

    def copy(self, part: int, piece: Piece, out: Tensor) -> Tensor:
        """Copy a piece of a part into `out` [elements of the piece], which is returned."""
        return torch.cat([self._run(part, index, run) for index, run in piece], out=out)

    def split(self, part: int, whole: Tensor) -> list[Tensor]:
        """Split a part of all tensors, [sum of sizes] with padding, into each tensor's part, flat, without padding."""
        return [
            each[: max(0, len(flat) - part * size)]
            for each, flat, size in zip(whole.split(self.sizes), self._flat, self.sizes, strict=True)
        ]

    def _run(self, part: int, index: int, run: range) -> Tensor:
        size = self.sizes[index]
        found = self._flat[index][part * size : (part + 1) * size][run.start : run.stop]
        return found if len(found) == len(run) else functional.pad(found, (0, len(run) - len(found)))


def width(piece: Piece) -> int:
    """Return the number of elements in a piece."""
    return sum(len(run) for _, run in piece)


class Started(NamedTuple):
    """A collective that has begun.

    Attributes:
        pieces: this rank's pieces to write, in order.
        rooms: for each piece, the shape of the largest that any rank writes.
        into: the output of each piece.
        combine: called with the pieces of all ranks and their output; fills it.
        first: the first pieces of all ranks, in shared memory.
    """

    pieces: Sequence[Tensor]
    rooms: Sequence[Sequence[int]]
    into: Sequence[Tensor]
    combine: Combine
    result: Tensor
    first: list[Tensor]


class HostMemory:
    """The memory that the ranks of one group share.

    All ranks must call the same methods in the same order, with tensors of the same shape and dtype. Every method
    raises ConnectionError if a rank has ended, TimeoutError if one does not come, and RuntimeError if the ranks are not
    in the same collective.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._turn = 0
        self._started: Started | None = None

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout: timedelta) -> HostMemory | None:
        """Return the shared memory of `group`, or None on all its ranks if they cannot share any; all must call it."""
        peers = meet(group, 2 * PIECE_BYTES, timeout)
        return None if peers is None else cls(peers)

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._peers.close()

    def all_reduce(self, x: Tensor, operation: Operation = torch.add, out: Tensor | None = None) -> Tensor:
        """Return the sum of `x` [...] over the ranks, or its maximum with `torch.maximum`.

        Args:
            out: a contiguous tensor for the result; may be `x`.
        """
        return self.start_all_reduce(x, operation, out)()

    def start_all_reduce(
        self, x: Tensor, operation: Operation = torch.add, out: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Begin `all_reduce` of `x` [...]; return a function that completes it. Until then `x` may not change."""
        x = x.detach().contiguous()
        total = torch.empty_like(x) if out is None else out
        numbers = max(PIECE_BYTES // x.element_size(), 1)

        def combine(shares: list[Tensor], into: Tensor) -> None:
            if len(shares) > 2 and _bytes(into) > _WHOLE_BYTES:
                into.copy_(self._reduced_in_shares(shares, operation, _bytes(into)))
            else:
                _reduce(shares, operation, into)

        return self._start(x.view(-1).split(numbers), total.view(-1).split(numbers), combine, total)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tensors `x` [...] of all ranks, stacked in rank order: [ranks, ...].

        Args:
            out: a contiguous tensor for the result; `x` may be this rank's part of it.
        """
        x = x.detach().contiguous()
        whole = x.new_empty((self._peers.size, *x.shape)) if out is None else out
        numbers = max(PIECE_BYTES // x.element_size(), 1)
        into = whole.view(self._peers.size, -1).split(numbers, dim=1)
        rank = self._peers.rank
        is_there = whole.view(self._peers.size, -1)[rank].data_ptr() == x.data_ptr()

        def place(shares: list[Tensor], places: Tensor) -> None:
            for index, (share, each) in enumerate(zip(shares, places, strict=True)):
                if index != rank or not is_there:
                    each.copy_(share)

        return self._start(x.view(-1).split(numbers), into, place, whole)()

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's share [n / ranks, ...] of the sum of `x` [n, ...] over the ranks.

        Args:
            out: a contiguous tensor for the result; may be this rank's share of `x`.
        """
        return self.start_reduce_scatter(x, out)()

    def start_reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin `reduce_scatter` of `x` [n, ...]; return a function that completes it. Do not change `x` before."""
        ranks = self._peers.size
        rows = x.detach().reshape(ranks, -1)
        own = x.new_empty((x.shape[0] // ranks, *x.shape[1:])) if out is None else out
        numbers = max(PIECE_BYTES // (x.element_size() * ranks), 1)

        def combine(shares: list[Tensor], into: Tensor) -> None:
            _reduce([share[self._peers.rank] for share in shares], torch.add, into)

        return self._start(rows.split(numbers, dim=1), own.view(-1).split(numbers), combine, own)

    def start_all_to_all(self, x: Tensor, sizes: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Begin an all-to-all of rows; return a function that completes it. Until then `x` may not change.

        Args:
            x: rows [n, ...] for all ranks, sorted by rank.
            sizes: rank i has `sizes[i][j]` rows for rank j.

        The result holds the rows from all ranks [m, ...], in rank order.
        """
        rank = self._peers.rank
        width = prod(x.shape[1:])
        flat = x.detach().contiguous().view(-1)
        result = x.new_empty((sum(row[rank] for row in sizes), *x.shape[1:]))
        kept = sizes[rank][rank] * width
        before = sum(sizes[rank][:rank]) * width
        of_kept = sum(row[rank] for row in sizes[:rank]) * width
        result.view(-1)[of_kept : of_kept + kept].copy_(flat[before : before + kept])
        travels = [[n * width * (i != j) for j, n in enumerate(row)] for i, row in enumerate(sizes)]
        around = [part for part in (flat[:before], flat[before + kept :]) if len(part)]
        sent = around[0] if len(around) == 1 else torch.cat(around or [flat[:0]])
        numbers = max(PIECE_BYTES // x.element_size(), 1)
        longest = max(map(sum, travels))
        starts = range(0, longest, numbers)

        def place(shares: list[Tensor], at: Tensor) -> None:
            done = 0
            start = int(at)
            for source, (row, full) in enumerate(zip(travels, sizes, strict=True)):
                first = sum(row[:rank])
                length = row[rank]
                low = max(first, start)
                high = min(first + length, start + numbers)
                if low < high:
                    part = shares[source][low - start : high - start]
                    result.view(-1)[done + low - first : done + high - first].copy_(part)
                done += full[rank] * width

        if not longest:
            return lambda: result
        rooms = [(min(numbers, longest - start),) for start in starts]
        pieces = [sent[start : start + numbers] for start in starts]
        return self._start(pieces, torch.tensor(starts).unbind(), place, result, rooms)

    def mean_of_parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of the mean of each tensor (any shape), flat [n], as `EqualShares` divides them.

        A rank reads its own part in place; only the others' parts are copied into shared memory.
        """
        self._end_started()
        rank, ranks = self._peers.rank, self._peers.size
        parts = EqualShares(tensors, ranks)
        means = tensors[0].new_empty(sum(parts.sizes))
        done = 0
        for piece in parts.pieces(PIECE_BYTES // (means.element_size() * ranks)):
            mean = means[done : done + width(piece)]
            shares = self._buffer((ranks, len(mean)), mean.dtype)
            for other in range(ranks):
                # divided before the sum, as DeepSpeed does, so that fp16 does not overflow
                parts.copy(other, piece, mean if other == rank else shares[rank][other]).div_(ranks)
            self._peers.tell_ranks(_bytes(shares[rank]))
            self._peers.wait_for_ranks(_bytes(shares[rank]))
            for other in range(ranks):
                if other != rank:
                    mean += shares[other][rank]
            done += len(mean)
        return parts.split(rank, means)

    def _end_started(self) -> None:
        if self._started is not None:
            self._end(self._started)

    def _start(
        self,
        pieces: Sequence[Tensor],
        into: Sequence[Tensor],
        combine: Combine,
        result: Tensor,
        rooms: Sequence[Sequence[int]] = (),
    ) -> Callable[[], Tensor]:
        """Write the first piece; return a function that completes the collective and returns `result`.

        That function waits for the pieces of all ranks, combines them into the output in `into`, and goes on with the
        next piece. `rooms` gives the shapes that all ranks expect if this rank's pieces may be shorter.
        """
        self._end_started()
        rooms = rooms or [piece.shape for piece in pieces]
        started = self._started = Started(pieces, rooms, into, combine, result, self._write(pieces[0], rooms[0]))
        return partial(self._end, started)

    def _end(self, started: Started) -> Tensor:
        if self._started is started:  # else it has ended
            self._started = None
            shares = started.first
            for number, (piece, room, place) in enumerate(
                zip(started.pieces, started.rooms, started.into, strict=True)
            ):
                shares = self._write(piece, room) if number else shares
                self._peers.wait_for_ranks(_bytes(shares[0]))
                started.combine(shares, place)
        return started.result

    def _write(self, piece: Tensor, room: Sequence[int]) -> list[Tensor]:
        """Write a piece and tell the others; return the pieces of all ranks.

        They may be read after the next `wait_for_ranks`, until the second `_write` from now, which reuses the buffer.
        """
        shares = self._buffer(room, piece.dtype)
        shares[self._peers.rank][: len(piece)].copy_(piece)
        self._peers.tell_ranks(_bytes(shares[0]))
        return shares

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Return the next buffer of each rank; other ranks may still read the last one."""
        size = prod(shape) * dtype.itemsize
        start = self._turn * PIECE_BYTES
        self._turn = 1 - self._turn
        return [memory[start : start + size].view(dtype).view(shape) for memory in self._peers.memory]

    def _reduced_in_shares(self, pieces: list[Tensor], operation: Operation, size: int) -> Tensor:
        """Return the sum of the pieces: each rank sums one share and reads the shares that the others have summed."""
        rank, ranks = self._peers.rank, self._peers.size
        shares = [piece.tensor_split(ranks) for piece in pieces]
        of_rank = [share[rank] for share in shares]
        own = torch.empty_like(of_rank[rank])
        _reduce(of_rank, operation, own)
        of_rank[rank].copy_(own)
        self._peers.tell_ranks(size)
        self._peers.wait_for_ranks(size)
        return torch.cat([share[index] for index, share in enumerate(shares)])


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _reduce(pieces: Sequence[Tensor], operation: Operation, into: Tensor) -> None:
    """Combine the pieces in rank order: a sum in another order would round differently."""
    operation(pieces[0], pieces[1], out=into)
    for piece in pieces[2:]:
        operation(into, piece, out=into)
