"""The shards of widths and attention heads on tensor-parallel ranks, as plain numbers. Imports no torch.

Shards need not be equal: if the ranks do not divide a width, the first ranks hold one unit more. Attention is split by
whole key/value heads, each with all of its query heads. With fewer key/value heads than ranks, neighbouring ranks hold
the same one and split its query heads. So on every rank each key/value head has the same number of query heads, as
transformers' attention requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""(start, stop) of a range of entries."""


def shard_range(total: int, index: int, size: int) -> Range:
    """Return part `index` of `total` entries in `size` parts; the first may have one entry more than the last."""
    least, longer = divmod(total, size)
    start = index * least + min(index, longer)
    return start, start + least + (index < longer)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The numbers of query and key/value heads of an attention module before sharding."""

    query: int
    key_value: int

    def fit(self, size: int) -> bool:
        """Return whether the heads can be split over `size` ranks so that each has a query head."""
        # No group of query heads belongs to a key/value head.
        if self.query % self.key_value:
            return self.query % size == 0 and self.key_value % size == 0
        return size <= self.query

    def queries(self, size: int) -> list[Range]:
        """Return the query heads of every rank. `fit` must hold."""
        if self.query % self.key_value:
            return [shard_range(self.query, rank, size) for rank in range(size)]
        group = self.query // self.key_value
        if size <= self.key_value:
            return [(start * group, stop * group) for start, stop in self.key_values(size)]
        found = []
        for head in range(self.key_value):
            first, last = shard_range(size, head, self.key_value)
            parts = (shard_range(group, index, last - first) for index in range(last - first))
            found += [(head * group + start, head * group + stop) for start, stop in parts]
        return found

    def key_values(self, size: int) -> list[Range]:
        """Return the key/value heads of every rank, some of them on several ranks. `fit` must hold."""
        if size <= self.key_value:
            return [shard_range(self.key_value, rank, size) for rank in range(size)]
        holders = [shard_range(size, head, self.key_value) for head in range(self.key_value)]
        return [(head, head + 1) for head, (first, last) in enumerate(holders) for _ in range(first, last)]
