"""Attention masks as transformers makes them for a model, with two changes: by rows, and with documents apart.

A mask of all pairs takes the square of the length: 16 GiB at 131,072 tokens. Inside `masks_by_rows` a model gets a
`MaskRows` instead. Attention asks it for the rows of some queries when it computes these, and again in the backward.

Inside `documents_apart` a mask lets no token see another document of its packed row. transformers does that only in
models that give their position ids to the function that makes the mask; gpt_oss, afmoe and others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface, packed_sequence_compatibility_function

from harness.parallel.tiles import tiles
from harness.parallel.values import Argument, Keyword

_queries: ContextVar[int] = ContextVar("queries of a mask that is made at a time", default=0)
_documents: ContextVar[Tensor | None] = ContextVar("positions in the documents that masks keep apart", default=None)


@dataclass(frozen=True, eq=False)
class MaskRows:
    """A mask that makes the rows of some queries when they are asked for.

    Attributes:
        make: transformers' function that makes a mask.
        given: the arguments with which the model called it.
        queries: how many attention computes at a time.
    """

    make: Callable[..., Tensor]
    given: Keyword
    queries: int

    def rows(self, start: int, stop: int, keys: slice | None = None) -> Tensor:
        """Return the mask [batch, 1, queries, keys] of queries `start` to `stop` - 1 and of the columns `keys` (None:
        all)."""
        keys = keys or slice(0, self.given["kv_length"])
        part = {
            "q_length": stop - start,
            "q_offset": self.given.get("q_offset", 0) + start,
            "kv_length": keys.stop - keys.start,
            "kv_offset": self.given.get("kv_offset", 0) + keys.start,
        }
        return self.make(**{**self.given, **part, "allow_is_causal_skip": False})

    def whole(self) -> Tensor:
        """Return the mask of all queries, [batch, 1, queries, keys]."""
        return self.rows(0, self.given["q_length"])

    @cached_property
    def keys(self) -> Sequence[slice]:
        """For each tile of queries, the range from the first to the last key that any of them sees.

        Slow, as the host waits for the device; computed once for all layers that share the mask.
        """
        ends = []
        for start, stop in tiles(self.given["q_length"], self.queries):
            rows = self.rows(start, stop)
            sees = (rows if rows.dtype == torch.bool else rows == 0).flatten(0, -2).any(0).byte()
            ends.append(torch.stack([sees.argmax(), len(sees) - sees.flip(0).argmax()]))
        return [slice(*pair) for pair in torch.stack(ends).tolist()]


@contextmanager
def documents_apart(positions: Tensor | None) -> Iterator[None]:
    """Make masks in which no token sees another document of its packed row, while the context lasts.

    `positions`: [batch, tokens], from 0 in each document; None: rows are not packed. transformers would read that from
    the values of the position ids, and the host would wait for the device in every forward.
    """
    if positions is not None:
        _wrap_interface()
    found = masking_utils.find_packed_sequence_indices
    vars(masking_utils)["find_packed_sequence_indices"] = lambda _positions: None
    before = _documents.set(positions)
    try:
        yield
    finally:
        _documents.reset(before)
        vars(masking_utils)["find_packed_sequence_indices"] = found


def _apart(function: Callable[..., Argument], positions: Tensor, **given: Argument) -> Argument:
    """Call transformers' function that makes a mask, for a mask that keeps documents apart."""
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    numbers = (steps != 1).cumsum(-1)  # the number of each token's document in its row
    apart = packed_sequence_compatibility_function(given["mask_function"], positions, numbers)
    return function(**{**given, "mask_function": apart, "allow_is_causal_skip": False})


@cache
def _wrap_interface() -> None:
    """Have models get transformers' functions that make masks wrapped, as the contexts that are entered ask for."""
    plain = AttentionMaskInterface.__getitem__

    def get(self: AttentionMaskInterface, key: str) -> Callable[..., Argument]:
        function: Callable[..., Argument] = plain(self, key)  # type: ignore[no-untyped-call]  # transformers gives it no types
        queries, positions = _queries.get(), _documents.get()
        if queries and key in ("sdpa", "eager"):
            function = partial(_later, function, key == "sdpa", queries)
        if positions is not None and key in ("sdpa", "eager", "flex_attention"):
            function = partial(_apart, function, positions)
        return function

    AttentionMaskInterface.__getitem__ = get  # type: ignore[method-assign, assignment]


def _later(function: Callable[..., Argument], can_skip: bool, queries: int, **given: Argument) -> Argument:
    """Return a `MaskRows`; None where transformers makes no mask, because plain causal attention needs none."""
    window, length = given.get("local_size"), given["kv_length"]
    plain = given.get("attention_mask") is None and given["q_length"] == length and (window is None or length < window)
    if can_skip and given.get("allow_is_causal_skip", True) and plain:
        return None
    return MaskRows(function, given, queries)


@contextmanager
def masks_by_rows(queries: int) -> Iterator[None]:
    """Give models masks made for `queries` queries at a time, while the context lasts; 0: whole masks."""
    if queries:
        _wrap_interface()
    before = _queries.set(queries)
    try:
        yield
    finally:
        _queries.reset(before)
