"""Masks that are made for some queries at a time, by the model's own function of them.

A mask of all pairs takes the square of the length: 16 GiB at 131,072 tokens. Where it is asked for, transformers'
functions that make one are not called: what a model is given in its place makes the rows of some queries when attention
computes these, and again in the backward. Rows are cut to the keys that some of the queries see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

from harness.parallel.tiles import tiles
from harness.parallel.values import Argument, Keyword

_queries: ContextVar[int] = ContextVar("queries of a mask that is made at a time", default=0)
_get_function = AttentionMaskInterface.__getitem__


@dataclass(frozen=True, eq=False)
class MaskRows:
    """A mask of which the rows of some queries are made when they are needed.

    Attributes:
        make: transformers' function that makes it; given: its arguments.
        queries: that attention computes at a time.
    """

    make: Callable[..., Tensor]
    given: Keyword
    queries: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the mask of queries `start` to `stop` - 1, [batch, 1, queries, keys], as the whole one would be."""
        first = self.given.get("q_offset", 0) + start
        return self.make(**{**self.given, "q_length": stop - start, "q_offset": first, "allow_is_causal_skip": False})

    def whole(self) -> Tensor:
        """Return the mask of all queries."""
        return self.rows(0, self.given["q_length"])

    @cached_property
    def keys(self) -> Sequence[slice]:
        """For each tile of queries the keys from the first to the last that one of them sees.

        Waits for the device, once for all layers that share the mask.
        """
        ends = []
        for start, stop in tiles(self.given["q_length"], self.queries):
            rows = self.rows(start, stop)
            sees = (rows if rows.dtype == torch.bool else rows == 0).flatten(0, -2).any(0).byte()
            ends.append(torch.stack([sees.argmax(), len(sees) - sees.flip(0).argmax()]))
        return [slice(*pair) for pair in torch.stack(ends).tolist()]


def _function(self: AttentionMaskInterface, key: str) -> Callable[..., Argument]:
    """Return transformers' function that makes a mask, or what makes it later."""
    function: Callable[..., Argument] = _get_function(self, key)  # type: ignore[no-untyped-call]  # transformers gives it no types
    queries = _queries.get()
    return partial(_later, function, key == "sdpa", queries) if queries and key in ("sdpa", "eager") else function


AttentionMaskInterface.__getitem__ = _function  # type: ignore[method-assign, assignment]


def _later(function: Callable[..., Argument], can_skip: bool, queries: int, **given: Argument) -> Argument:
    """Return a mask that is made later; None where transformers makes none, as causality says it all."""
    window, length = given.get("local_size"), given["kv_length"]
    plain = given.get("attention_mask") is None and given["q_length"] == length and (window is None or length < window)
    if can_skip and given.get("allow_is_causal_skip", True) and plain:
        return None
    return MaskRows(function, given, queries)


@contextmanager
def masks_by_rows(queries: int) -> Iterator[None]:
    """Have masks made for so many queries at a time while this is entered; 0: as transformers makes them."""
    before = _queries.set(queries)
    try:
        yield
    finally:
        _queries.reset(before)
