"""Exchange attention heads for tokens among context ranks, and back.

A gradient belongs to one rank's loss (`harness/parallel/context/sequence_shards.py`), so the backward of
`exchange_heads` sums the gradients of a head that several ranks have received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.sharding import Range
from harness.parallel.comm import Context, apply
from harness.parallel.context.sequence_shards import ContextParallel


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
