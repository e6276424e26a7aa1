"""Context ranks: which tokens of a sequence each keeps, and how ranks exchange tokens and heads.

The tokens that a rank keeps are its *shard*. If the number of ranks does not divide the length of the sequence, the
first ranks keep one token more.

Context ranks are data-parallel ranks: each rank's loss counts its own tokens, and DeepSpeed sums the gradients of all
ranks. So a gradient here belongs to one rank's loss. A tensor made from the tokens of all ranks has such a partial
gradient on every rank, and the backward of `join` and `exchange_heads` sums them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.sharding import Range, shard_range
from harness.parallel.comm import (
    Context,
    MoveShards,
    apply,
    group_rank,
    group_size,
    join_shards,
    sum_of_shard,
)


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """One rank's place in its context-parallel group."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ContextParallel:
        """Return the calling rank's place in `group`; None is a group of one rank."""
        return cls(group=group, rank=group_rank(group), size=group_size(group))

    def token_range(self, length: int) -> Range:
        """Return start and stop of this rank's tokens of a sequence."""
        return shard_range(length, self.rank, self.size)

    def widths(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens that each rank keeps."""
        return tuple(
            stop - start for start, stop in (shard_range(length, rank, self.size) for rank in range(self.size))
        )

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return a view of this rank's shard along `dim`: for 1, [batch, own tokens, ...] of [batch, tokens, ...]."""
        start, stop = self.token_range(whole.shape[dim])
        return whole.narrow(dim, start, stop - start)

    def join(self, shard: Tensor, length: int, dim: int = 1) -> Tensor:
        """Join the ranks' shards along `dim`: for 1, [batch, own tokens, ...] into [batch, length, ...].

        Backward: reduce-scatter the gradient, so that each rank keeps the sum for its own tokens.
        """
        if self.group is None:
            return shard
        joined = apply(_JoinShards, shard.movedim(dim, 1).contiguous(), self.group, self.widths(length), 1)
        return joined.movedim(1, dim)


ALONE = ContextParallel()
"""The only rank of a context-parallel group."""


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Cuts or joins tensors with a row for each token, recognised by their shape.

    Such tensors are [batch, tokens, ...], or flat, [batch * tokens, size].

    Attributes:
        batch: samples in the micro-batch.
        length: tokens of a whole sequence.
    """

    context: ContextParallel
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Number of tokens of this rank's shard."""
        start, stop = self.context.token_range(self.length)
        return stop - start

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with a row for each token of all ranks; return others unchanged."""
        if _has_rows(whole, self.batch, self.length):
            return self.context.own(whole)
        if _is_flat(whole, self.batch, self.length):
            return self.context.own(whole.unflatten(0, (self.batch, -1))).flatten(0, 1)
        return whole

    def join(self, shard: Tensor) -> Tensor:
        """Return the rows of all ranks for a floating-point tensor with a row for each token of this rank.

        Any other tensor is returned unchanged.
        """
        if not shard.is_floating_point():
            return shard
        if _has_rows(shard, self.batch, self.tokens):
            return self.context.join(shard, self.length)
        if _is_flat(shard, self.batch, self.tokens):
            return self.context.join(shard.unflatten(0, (self.batch, -1)), self.length).flatten(0, 1)
        return shard


def _has_rows(x: Tensor, batch: int, tokens: int) -> bool:
    return x.dim() > 2 and tuple(x.shape[:2]) == (batch, tokens)


def _is_flat(x: Tensor, batch: int, tokens: int) -> bool:
    return x.dim() == 2 and x.shape[0] == batch * tokens


class _JoinShards(MoveShards):
    forth, back = staticmethod(join_shards), staticmethod(sum_of_shard)


def exchange_heads(x: Tensor, heads: list[Range], context: ContextParallel, length: int) -> Tensor:
    """Exchange all heads of this rank's tokens, x [batch, heads, own tokens, size], for this rank's heads of all
    `length` tokens, [batch, own heads, length, size].

    `heads` has start and stop for each rank; several ranks may receive the same heads. Backward: gradients are
    exchanged back, and summed over the ranks that received the same head.
    """
    return apply(_Exchange, x, _HeadsAndTokens(heads, context, context.widths(length), x.shape[1]), True)


def exchange_tokens(x: Tensor, heads: list[Range], context: ContextParallel) -> Tensor:
    """Exchange this rank's heads of all tokens, x [batch, own heads, length, size], for all heads of this rank's
    tokens, [batch, heads, own tokens, size]. Each head must belong to one rank."""
    all_heads = max(stop for _, stop in heads)
    return apply(_Exchange, x, _HeadsAndTokens(heads, context, context.widths(x.shape[2]), all_heads), False)


@dataclass(frozen=True)
class _HeadsAndTokens:
    """Which heads and how many tokens each rank has.

    Attributes:
        heads: start and stop, by rank.
        widths: number of tokens, by rank.
        all_heads: number of heads.
    """

    heads: list[Range]
    context: ContextParallel
    widths: tuple[int, ...]
    all_heads: int

    def to_heads(self, x: Tensor) -> Tensor:
        batch, _, _, size = x.shape
        first, last = self.heads[self.context.rank]
        parts = (x[:, start:stop] for start, stop in self.heads)
        shapes = [(batch, last - first, width, size) for width in self.widths]
        return torch.cat(list(_all_to_all(parts, shapes, self.context)), dim=2)

    def to_tokens(self, x: Tensor) -> Tensor:
        batch, _, _, size = x.shape
        tokens = self.widths[self.context.rank]
        shapes = [(batch, stop - start, tokens, size) for start, stop in self.heads]
        whole = x.new_zeros(batch, self.all_heads, tokens, size)
        received = _all_to_all(iter(x.split(list(self.widths), dim=2)), shapes, self.context)
        for (start, stop), part in zip(self.heads, received, strict=True):
            # Added, not assigned: in the backward of `exchange_heads`, several ranks may send gradients of the same
            # heads.
            whole[:, start:stop] += part
        return whole


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, split: _HeadsAndTokens, to_heads: bool) -> Tensor:
        ctx.split = split
        ctx.to_heads = to_heads
        return split.to_heads(x) if to_heads else split.to_tokens(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.split.to_tokens(grad) if ctx.to_heads else ctx.split.to_heads(grad)), None, None


def _all_to_all(
    parts: Iterator[Tensor], shapes: Sequence[tuple[int, ...]], context: ContextParallel
) -> Iterator[Tensor]:
    """Send one of `parts` to each rank; yield the parts received from each rank, in these `shapes`."""
    sent = [part.reshape(-1) for part in parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat(sent)
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, [part.numel() for part in sent], group=context.group)
    return (part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True))
