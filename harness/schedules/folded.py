"""Orders of a folded model: the first stage has the first and the last of its chunks, and computes the loss.

Such orders are made for about twice as many micro-batches as stages, or more. With fewer, a stage follows the order for
that many and skips the passes of micro-batches that do not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from harness.schedules.chunks import ModelChunks
from harness.schedules.schedule import Kind, Pass

KINDS = {"F": Kind.FORWARD, "B": Kind.INPUT_GRADIENTS, "BW": Kind.BACKWARD}


class Passes:
    """Collects the passes of a stage from a short notation.

    `0F` is a forward pass of the stage's first chunk, `1B` the input gradients of its second chunk, `0BW` a whole
    backward pass, `W` the weight gradients that have been deferred longest.
    """

    def __init__(self, chunks: list[int]) -> None:
        self._chunks = chunks
        self._passes: list[Pass] = []
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._deferred: deque[Pass] = deque()

    @property
    def deferred(self) -> int:
        """Number of weight gradients that are deferred now."""
        return len(self._deferred)

    def forwards(self, half: int) -> int:
        """Return the number of forward passes so far of the stage's first (0) or second (1) chunk."""
        return self._forwards[half]

    def add(self, passes: str, times: int) -> None:
        """Append a sequence of passes `times` times; micro-batches are numbered in order."""
        for name in passes.split() * times:
            if name == "W":
                self._passes.append(self._deferred.popleft())
                continue
            half = int(name[0])
            kind = KINDS[name[1:]]
            counts = self._forwards if kind is Kind.FORWARD else self._backwards
            self._passes.append(Pass(kind, counts[half], self._chunks[half]))
            if kind is Kind.INPUT_GRADIENTS:
                self._deferred.append(Pass(Kind.WEIGHT_GRADIENTS, counts[half], self._chunks[half]))
            counts[half] += 1

    def of(self, micro_batches: int) -> Iterator[Pass]:
        """Return the passes of the first micro-batches."""
        return (each for each in self._passes if each.micro_batch < micro_batches)


def waits(chunks: ModelChunks, micro_batches: int) -> int:
    """Return the idle time: a sixth of 1F1B's, if there are twice as many micro-batches as stages (arXiv 2401.10241,
    section 6)."""
    return max(chunks.num_stages - 1, 4 * chunks.num_stages - 2 - 2 * micro_batches)


def in_flight(chunks: ModelChunks, micro_batches: int, _stage: int) -> float:
    """Return the number of micro-batches held: as many as the first stage under 1F1B, on every stage."""
    return min(chunks.num_stages, micro_batches)
