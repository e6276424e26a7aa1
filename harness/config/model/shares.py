"""How widths and attention heads are dealt out to tensor-parallel ranks, as plain numbers. No torch here.

A share need not be equal: the first ranks then hold one unit more. An attention is dealt out by whole key/value heads,
each with all query heads that it serves; where there are fewer of them than ranks, neighbouring ranks hold the same one
and deal out its query heads. So on every rank each key/value head serves equally many query heads, as transformers'
attention takes for granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Stretch: TypeAlias = tuple[int, int]
"""Start and stop."""


def stretch(total: int, index: int, size: int) -> Stretch:
    """Return part `index` of `total` entries in `size` parts; the first may have one entry more than the last."""
    least, longer = divmod(total, size)
    start = index * least + min(index, longer)
    return start, start + least + (index < longer)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many query and key/value heads an attention module has, before it is cut."""

    query: int
    key_value: int

    def fit(self, size: int) -> bool:
        """Whether `size` ranks can deal them out, so that each has a query head."""
        if self.query % self.key_value:  # no group of query heads belongs to a key/value head
            return self.query % size == 0 and self.key_value % size == 0
        return size <= self.query

    def queries(self, size: int) -> list[Stretch]:
        """Return the query heads of every rank. `fit` must hold."""
        if self.query % self.key_value:
            return [stretch(self.query, rank, size) for rank in range(size)]
        group = self.query // self.key_value
        if size <= self.key_value:
            return [(start * group, stop * group) for start, stop in self.key_values(size)]
        found = []
        for head in range(self.key_value):
            first, last = stretch(size, head, self.key_value)
            parts = (stretch(group, index, last - first) for index in range(last - first))
            found += [(head * group + start, head * group + stop) for start, stop in parts]
        return found

    def key_values(self, size: int) -> list[Stretch]:
        """Return the key/value heads of every rank, some of them on several ranks. `fit` must hold."""
        if size <= self.key_value:
            return [stretch(self.key_value, rank, size) for rank in range(size)]
        holders = [stretch(size, head, self.key_value) for head in range(self.key_value)]
        return [(head, head + 1) for head, (first, last) in enumerate(holders) for _ in range(first, last)]
