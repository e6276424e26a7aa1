"""Which tokens of a sequence each context rank keeps, and how stretches become whole sequences and come back.

Context ranks are data ranks: the loss of each counts the tokens of its own stretch, and DeepSpeed sums the gradients
of all. So every gradient here is *partial*: what a rank computes of all tokens gets a gradient from its own loss alone,
and joining stretches sums the gradients of all ranks in the backward. Stretches need not be equal: the first ranks keep
a token more where the ranks do not divide the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.shares import Stretch, stretch
from harness.parallel.comm import Context, apply, group_rank, group_size
from harness.parallel.tensor.sequence import join_shares, start_reduce


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """One rank's place among the ranks that share a sequence."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ContextParallel:
        """Return the calling rank's place in `group`; no group is a group of one."""
        return cls(group=group, rank=group_rank(group), size=group_size(group))

    def stretch(self, length: int) -> Stretch:
        """Return start and stop of this rank's tokens of a sequence."""
        return stretch(length, self.rank, self.size)

    def widths(self, length: int) -> tuple[int, ...]:
        """Return how many of the tokens each rank keeps."""
        return tuple(stop - start for start, stop in (stretch(length, rank, self.size) for rank in range(self.size)))

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's stretch of what is there for all tokens along `dim`, as a view."""
        start, stop = self.stretch(whole.shape[dim])
        return whole.narrow(dim, start, stop - start)

    def join(self, share: Tensor, length: int, dim: int = 1) -> Tensor:
        """Join the stretches of sequences of `length` tokens along `dim`. Backward: the gradients of all ranks are
        summed, and each keeps those of its own tokens."""
        if self.group is None:
            return share
        joined = apply(_JoinStretches, share.movedim(dim, 1).contiguous(), self.group, self.widths(length))
        return joined.movedim(1, dim)


ALONE = ContextParallel()
"""A rank that shares no sequence."""


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Tells by its shape what holds one row a token: [batch, tokens, ...], or flat [batch * tokens, ...].

    Attributes:
        batch: samples.
        length: tokens of a whole sequence.
    """

    context: ContextParallel
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of this rank's stretch."""
        start, stop = self.context.stretch(self.length)
        return stop - start

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that has rows of all tokens; any other tensor as it is."""
        if _has_rows(whole, self.batch, self.length):
            return self.context.own(whole)
        if _is_flat(whole, self.batch, self.length):
            return self.context.own(whole.unflatten(0, (self.batch, -1))).flatten(0, 1)
        return whole

    def join(self, share: Tensor) -> Tensor:
        """Return rows of all tokens for a floating tensor that has this rank's; any other tensor as it is."""
        if not share.is_floating_point():
            return share
        if _has_rows(share, self.batch, self.tokens):
            return self.context.join(share, self.length)
        if _is_flat(share, self.batch, self.tokens):
            return self.context.join(share.unflatten(0, (self.batch, -1)), self.length).flatten(0, 1)
        return share


def _has_rows(x: Tensor, batch: int, tokens: int) -> bool:
    return x.dim() > 2 and tuple(x.shape[:2]) == (batch, tokens)


def _is_flat(x: Tensor, batch: int, tokens: int) -> bool:
    return x.dim() == 2 and x.shape[0] == batch * tokens


class _JoinStretches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, share: Tensor, group: dist.ProcessGroup, widths: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return join_shares(share, group, widths)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce(grad, ctx.group, ctx.widths)(), None, None


def exchange_heads(x: Tensor, heads: list[Stretch], context: ContextParallel, length: int) -> Tensor:
    """Return some heads of all tokens [batch, own heads, length, size] for all heads of this rank's tokens [batch,
    heads, tokens, size].

    `heads`: those that each rank gets; several ranks may get the same one. Backward: the way back, with a sum over the
    ranks that have a head.
    """
    return apply(_ExchangeHeads, x, heads, context, context.widths(length))


def exchange_tokens(x: Tensor, heads: list[Stretch], context: ContextParallel) -> Tensor:
    """Return all heads of this rank's tokens [batch, heads, tokens, size] for its heads of all tokens [batch, own
    heads, length, size]; each head is one rank's."""
    return apply(_ExchangeTokens, x, heads, context, context.widths(x.shape[2]))


class _ExchangeHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, heads: list[Stretch], context: ContextParallel, widths: tuple[int, ...]
    ) -> Tensor:
        ctx.heads, ctx.context, ctx.widths, ctx.count = heads, context, widths, x.shape[1]
        return _to_heads(x, heads, context, widths)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _to_tokens(grad, ctx.heads, ctx.context, ctx.widths, ctx.count), None, None, None


class _ExchangeTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, heads: list[Stretch], context: ContextParallel, widths: tuple[int, ...]
    ) -> Tensor:
        ctx.heads, ctx.context, ctx.widths = heads, context, widths
        return _to_tokens(x, heads, context, widths, max(stop for _, stop in heads))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _to_heads(grad, ctx.heads, ctx.context, ctx.widths), None, None, None


def _to_heads(x: Tensor, heads: list[Stretch], context: ContextParallel, widths: tuple[int, ...]) -> Tensor:
    batch, _, _, size = x.shape
    first, last = heads[context.rank]
    parts = (x[:, start:stop] for start, stop in heads)
    shapes = [(batch, last - first, width, size) for width in widths]
    return torch.cat(list(_all_to_all(parts, shapes, context)), dim=2)


def _to_tokens(
    x: Tensor, heads: list[Stretch], context: ContextParallel, widths: tuple[int, ...], all_heads: int
) -> Tensor:
    batch, _, _, size = x.shape
    tokens = widths[context.rank]
    shapes = [(batch, stop - start, tokens, size) for start, stop in heads]
    whole = x.new_zeros(batch, all_heads, tokens, size)
    for (start, stop), part in zip(
        heads, _all_to_all(iter(x.split(list(widths), dim=2)), shapes, context), strict=True
    ):
        whole[:, start:stop] += part
    return whole


def _all_to_all(
    parts: Iterator[Tensor], shapes: Sequence[tuple[int, ...]], context: ContextParallel
) -> Iterator[Tensor]:
    """Send one tensor to each rank; yield what each rank sent, of these shapes."""
    sent = [part.reshape(-1) for part in parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat(sent)
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, [part.numel() for part in sent], group=context.group)
    return (part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True))
