"""Change transformers' attention masks in two ways: made by rows, and with packed documents kept apart.

The memory of a full mask grows with the square of the length: 16 GiB at 131,072 tokens. Inside `masks_by_rows` a model
receives a `MaskRows` instead. Attention asks it for the rows of some queries at a time, and again in the backward.

Inside `documents_apart` a mask lets no token see another document of its packed row. transformers does so only in
models that pass their position ids to the mask function; gpt_oss, afmoe and others do not.
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

from harness.parallel.values import Argument, Keyword

_queries: ContextVar[int] = ContextVar("queries of a mask that is made at a time", default=0)
_documents: ContextVar[Tensor | None] = ContextVar("positions in the documents that masks keep apart", default=None)


@dataclass(frozen=True, eq=False)
class MaskRows:
    """A mask that makes the rows of some queries on demand.

    Attributes:
        make: transformers' mask function.
        given: the arguments with which the model called it.
        queries: number of queries for which attention is computed at a time.
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
        # Without the skip: transformers leaves out a causal mask, but SDPA's own starts at the first row.
        return self.make(**{**self.given, **part, "allow_is_causal_skip": False})

    def whole(self) -> Tensor:
        return self.rows(0, self.given["q_length"])

    @cached_property
    def keys(self) -> Sequence[slice]:
        """For each tile of queries, the range from the first to the last key that any of them sees.

        The host waits for the device here, so this is computed once for all layers that share the mask.
        """
        ends = []
        length = self.given["q_length"]
        for start in range(0, length, self.queries):
            rows = self.rows(start, min(start + self.queries, length))
            # A float mask (eager attention) is added to the scores: it is 0 where a query sees a key. Bytes, because
            # torch has no argmax of bool tensors.
            sees = (rows if rows.dtype == torch.bool else rows == 0).flatten(0, -2).any(0).byte()
            ends.append(torch.stack([sees.argmax(), len(sees) - sees.flip(0).argmax()]))
        return [slice(*pair) for pair in torch.stack(ends).tolist()]


@contextmanager
def documents_apart(positions: Tensor | None) -> Iterator[None]:
    """In this context, make masks in which no token sees another document of its packed row.

    `positions` are [batch, tokens], from 0 in each document; None if rows are not packed.
    """
    if positions is not None:
        _wrap_interface()
    # transformers would look for documents in the values of the position ids, and the host would wait for the device in
    # every forward.
    found = masking_utils.find_packed_sequence_indices
    vars(masking_utils)["find_packed_sequence_indices"] = lambda _positions: None
    before = _documents.set(positions)
    try:
        yield
    finally:
        _documents.reset(before)
        vars(masking_utils)["find_packed_sequence_indices"] = found


def _apart(function: Callable[..., Argument], positions: Tensor, **given: Argument) -> Argument:
    """Call transformers' mask function for a mask that keeps documents apart."""
    # The prepended position gives the first token a step of 1, so that it begins no second document.
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    # The number of each token's document in its row.
    numbers = (steps != 1).cumsum(-1)
    apart = packed_sequence_compatibility_function(given["mask_function"], positions, numbers)
    # Without the skip: transformers would leave out the mask of a causal row without padding, documents or not.
    return function(**{**given, "mask_function": apart, "allow_is_causal_skip": False})


@cache  # once for the process: a second wrapper would call the first
def _wrap_interface() -> None:
    """Wrap the mask functions that models look up, so that they follow the active contexts."""
    # Every model takes its mask function from this mapping, by the name of its attention, in each forward.
    plain = AttentionMaskInterface.__getitem__

    def get(self: AttentionMaskInterface, key: str) -> Callable[..., Argument]:
        function: Callable[..., Argument] = plain(self, key)  # type: ignore[no-untyped-call]  # transformers gives it no types
        queries = _queries.get()
        positions = _documents.get()
        if queries and key in ("sdpa", "eager"):
            function = partial(_later, function, key == "sdpa", queries)
        if positions is not None and key in ("sdpa", "eager", "flex_attention"):
            function = partial(_apart, function, positions)
        return function

    AttentionMaskInterface.__getitem__ = get  # type: ignore[method-assign, assignment]


def _later(function: Callable[..., Argument], can_skip: bool, queries: int, **given: Argument) -> Argument:
    """Return a `MaskRows`, or None as transformers does for plain causal attention, which needs no mask."""
    window = given.get("local_size")
    length = given["kv_length"]
    plain = given.get("attention_mask") is None and given["q_length"] == length and (window is None or length < window)
    if can_skip and given.get("allow_is_causal_skip", True) and plain:
        return None
    return MaskRows(function, given, queries)


@contextmanager
def masks_by_rows(queries: int) -> Iterator[None]:
    """In this context, give models masks made for `queries` queries at a time; 0 for whole masks."""
    if queries:
        _wrap_interface()
    before = _queries.set(queries)
    try:
        yield
    finally:
        _queries.reset(before)
