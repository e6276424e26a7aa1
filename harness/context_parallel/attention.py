"""Context-parallel attention by exchanging heads for tokens (Ulysses: Jacobs et al. 2023, arXiv 2309.14509).

Each rank has the queries, keys and values of its own tokens for all heads. An all-to-all exchanges them for all tokens
of some heads. The model's own attention function runs on these, with the model's mask for the whole sequence, and a
second all-to-all brings its output back.

transformers models look up their attention function with `AttentionInterface.get_interface`, which is wrapped when
heads are first exchanged. So no model family is named. Tensors with an entry for each head (sinks, slopes, biases) are
cut to the rank's heads. If the heads cannot be distributed over the ranks, for example because they are too few, every
rank computes all heads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from harness.config.model.sharding import Heads, Range
from harness.context_parallel.exchange import exchange_heads, exchange_tokens
from harness.context_parallel.tiles import computed_again
from harness.parallel.comm import Context, apply
from harness.parallel.context.masks import MaskRows
from harness.parallel.context.sequence_shards import ContextParallel
from harness.parallel.dropout import expect_heads
from harness.parallel.values import Argument, Keyword, Positional


class _Active(threading.local):
    """The exchange in which this thread's layer runs; torch.compile reads a thread's attribute, but no ContextVar."""

    shared: SharedAttention | None = None

    @contextmanager
    def set(self, shared: SharedAttention | None) -> Iterator[None]:
        """Have this thread's attentions use `shared` in this context."""
        before, self.shared = self.shared, shared
        try:
            yield
        finally:
            self.shared = before


_active = _Active()

Attend: TypeAlias = Callable[..., Argument]
"""An attention function of transformers.

It takes a module, query, key and value [batch, heads, tokens, size], a mask and more, and returns the attention output
[batch, tokens, heads, size] and weights."""


@cache
def _wrap_interface() -> None:
    """Have models get their attention function wrapped in the exchange, in layers that work on a shard."""
    plain = AttentionInterface.get_interface

    @wraps(plain)
    def get_interface(self: AttentionInterface, attn_implementation: str, default: Attend) -> Attend:
        function: Attend = plain(self, attn_implementation, default)
        active = _active.shared
        return function if active is None else partial(active.attend, function)

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


@dataclass(kw_only=True)
class SharedAttention:
    """Exchanges heads around the attention of a layer that works on a shard of the tokens.

    Attributes:
        length: number of tokens of the whole sequence.
        whole: the layer's cut arguments in full length, by the `id` of the cut part, because attention sees all tokens.
    """

    context: ContextParallel
    length: int
    whole: Mapping[int, Tensor] = field(default_factory=dict)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Exchange heads around every attention called in this context."""
        _wrap_interface()
        with _active.set(self):
            yield

    def attend(
        self,
        function: Callable[..., tuple[Tensor, object]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Argument,
        **kwargs: Argument,
    ) -> tuple[Tensor, None]:
        """Call `function` with the tokens of all ranks; query, key and value are [batch, heads, own tokens, size].

        Returns the attention output of this rank's tokens, [batch, own tokens, heads, size], and no weights.

        Raises:
            RuntimeError: the queries or keys do not belong to this rank's tokens, as in cross-attention.
        """
        start, stop = self.context.token_range(self.length)
        if any(x.shape[2] != stop - start for x in (query, key, value)):
            raise RuntimeError(f"attention gives keys other than those of its {stop - start} tokens")
        args = tuple(map(self._for_all_tokens, args))
        kwargs = {name: self._for_all_tokens(value) for name, value in kwargs.items()}
        heads = Heads(query=query.shape[1], key_value=key.shape[1])
        size = self.context.size
        # Nothing to exchange: the layer is here only for its tiles of queries.
        if size == 1:
            return _attention(function, module, (query, key, value), attention_mask, args, kwargs), None
        if not heads.fit(size):  # every rank computes all heads
            query, key, value = (self.context.join(x, self.length, 2) for x in (query, key, value))
            output = _attention(function, module, (query, key, value), attention_mask, args, kwargs)
            return self.context.own(output).contiguous(), None
        queries = heads.queries(size)
        keys = heads.key_values(size)
        own = queries[self.context.rank]
        query = exchange_heads(query, queries, self.context, self.length)
        key, value = (exchange_heads(x, keys, self.context, self.length) for x in (key, value))
        cut = partial(_own_heads, heads=heads.query, own=own)
        with expect_heads(self.context.rank, tuple(stop - start for start, stop in queries)):
            output = _attention(
                function,
                HeadsOf(module, cut, query.shape[1] // key.shape[1]),
                (query, key, value),
                cut(attention_mask),
                tuple(map(cut, args)),
                {name: cut(given) for name, given in kwargs.items()},
            )
        # contiguous, as transformers' own functions return it: some models view it
        return exchange_tokens(output.transpose(1, 2), queries, self.context).transpose(1, 2).contiguous(), None

    def _for_all_tokens(self, given: Argument) -> Argument:
        return self.whole.get(id(given), given)


def _attention(
    function: Attend,
    module: object,
    projected: tuple[Tensor, Tensor, Tensor],
    mask: Argument,
    args: Positional,
    kwargs: Keyword,
) -> Tensor:
    """Return attention [batch, tokens, heads, size]; `projected`: query, key and value [batch, heads, tokens, size].

    With a mask made by rows, attention is computed for some queries at a time, and again in the backward.
    """
    if not isinstance(mask, MaskRows):
        whole: Tensor = function(module, *projected, mask, *args, **kwargs)[0]
        return whole
    parts, start = [], 0
    query, key, value = projected
    for own, keys in zip(query.split(mask.queries, 2), mask.keys, strict=True):
        (key, own_key), (value, own_value) = (apply(_Seen, x, keys) for x in (key, value))
        of_queries = partial(_of_queries, function, module, mask, tuple(kwargs), start, keys)
        parts.append(computed_again(of_queries, own, own_key, own_value, *args, *kwargs.values()))
        start += own.shape[2]
    return torch.cat(parts, dim=1)


def _of_queries(
    function: Attend, module: object, mask: MaskRows, names: tuple[str, ...], start: int, keys: slice, *given: Argument
) -> Argument:
    """Return the attention of a tile of queries, starting at query `start`, over the keys that it sees."""
    query, key, value, *rest = given
    rows = mask.rows(start, start + query.shape[2], keys)
    count = len(rest) - len(names)
    named = dict(zip(names, rest[count:], strict=True))
    return function(module, query, key, value, rows, *rest[:count], **named)[0]


class _Seen(torch.autograd.Function):
    """Forward: return x [batch, heads, keys, size] for the next tile, and the keys of x that this tile of queries sees.

    Backward: the last tile comes first. Each tile adds its gradient in place to the gradient of x from the next tile. A
    plain slice would allocate a gradient of the length of x for every tile.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        ctx.shape = x.shape
        ctx.keys = keys
        ctx.set_materialize_grads(False)
        return x.view_as(x), x[:, :, keys]

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, seen: Tensor) -> tuple[Tensor, None]:
        if grad is None:  # this is the last tile
            grad = seen.new_zeros(ctx.shape)
        grad[:, :, ctx.keys] += seen
        return grad, None


class HeadsOf:
    """An attention module reduced to this rank's heads, for its attention function.

    Attention functions read some values, such as sinks, from the module and not from their arguments.
    """

    def __init__(self, module: nn.Module, cut: Callable[[object], object], groups: int) -> None:
        self._module = module
        self._cut = cut
        self._groups = groups

    def __getattr__(self, name: str) -> Argument:
        value = getattr(self._module, name)
        return self._groups if name == "num_key_value_groups" else self._cut(value)


def _own_heads(given: Argument, *, heads: int, own: Range) -> Argument:
    """Return this rank's heads of a tensor with an entry for each head; return anything else unchanged.

    Such tensors are [heads], [heads, queries, keys] or [batch, heads, queries, keys].
    """
    if heads == 1 or not isinstance(given, Tensor):
        return given
    dim = {1: 0, 3: 0, 4: 1}.get(given.dim())
    if dim is None or given.shape[dim] != heads:
        return given
    return given.narrow(dim, own[0], own[1] - own[0])


@contextmanager
def whole_attention() -> Iterator[None]:
    """Disable the exchange in this context, for a block that receives all tokens."""
    with _active.set(None):
        yield
