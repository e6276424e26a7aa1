"""How many attention heads a tiny copy of a config has: few, in the ratios of the config, shared by ranks as before."""

from __future__ import annotations

import math
from collections.abc import Collection

LEAST_HEADS, MOST_HEADS = 4, 16


def fewer_heads(counts: Collection[int], tensor: int) -> dict[int, int]:
    """Return what each number of heads becomes: all are divided by one number, so that their ratios stay.

    Args:
        counts: the numbers of heads in the config (of queries, of keys and values, of single layers).
        tensor: the number of tensor-parallel ranks that share them.
    """
    if not counts:
        return {}
    common = math.gcd(*counts)
    best = max(g for g in range(1, common + 1) if common % g == 0 and (g == 1 or _may_divide(counts, g, tensor)))
    if max(counts) // best > MOST_HEADS:  # no common ratio to keep
        return _fewest(counts, tensor)
    return {n: n // best for n in counts}


def _may_divide(counts: Collection[int], divisor: int, tensor: int) -> bool:
    """Return whether the numbers, divided, are large enough and are shared by the tensor-parallel ranks as before."""
    enough = max(counts) // divisor >= LEAST_HEADS and min(counts) // divisor >= min(LEAST_HEADS // 2, min(counts))
    return enough and all(_sharing(n, tensor) == _sharing(n // divisor, tensor) for n in counts)


def _sharing(count: int, tensor: int) -> tuple[bool, bool]:
    """Return how ranks share heads: whether each has one of its own, and whether the shares are equal."""
    several = count >= tensor
    return several, (count % tensor if several else tensor % count) == 0


def _fewest(counts: Collection[int], tensor: int) -> dict[int, int]:
    """Return the fewest heads that divide each other, and are shared by the ranks, as before."""
    most = max(counts)
    for top in range(LEAST_HEADS, 8 * MOST_HEADS):
        if _sharing(top, tensor) != _sharing(most, tensor):
            continue
        others = set(counts) - {most}
        found = {n: [m for m in range(min(n, 2), top) if _alike((m, top), (n, most), tensor)] for n in others}
        if all(found.values()):
            return {most: top, **{n: fitting[0] for n, fitting in found.items()}}
    return {n: LEAST_HEADS * tensor if n == most else min(n, LEAST_HEADS // 2) for n in counts}


def _alike(fewer: tuple[int, int], before: tuple[int, int], tensor: int) -> bool:
    """Return whether a number of heads and the largest one divide, and are shared, as those before them."""
    divides = fewer[1] % fewer[0] == 0, before[1] % before[0] == 0
    return divides[0] == divides[1] and _sharing(fewer[0], tensor) == _sharing(before[0], tensor)
