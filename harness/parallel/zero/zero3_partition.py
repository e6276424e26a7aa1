"""ZeRO-3's part of a tensor: an equal share of its elements, one after the other, for each data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True)
class Zero3Partition:
    """Part `index` of `count`; the last ones may be shorter, or empty."""

    index: int
    count: int

    def boxes(self, shape: Sequence[int]) -> Iterator[Index]:
        """Return indices of boxes that together are this part of a tensor of `shape`."""
        total = prod(shape)
        size = -(-total // self.count)
        return boxes_of_run(shape, min(self.index * size, total), min((self.index + 1) * size, total))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """Return indices of boxes that together are elements `start` to `stop` - 1: a row's end, whole rows, a row's
    beginning."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        yield from ((last, *box) for box in boxes_of_run(shape[1:], start - last * inner, stop - last * inner))
        return
    yield from ((first - 1, *box) for box in boxes_of_run(shape[1:], start - (first - 1) * inner, inner))
    if first < last:
        yield (slice(first, last),)
    yield from ((last, *box) for box in boxes_of_run(shape[1:], 0, stop - last * inner))
