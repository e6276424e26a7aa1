"""Tokens that travel to the ranks of their experts, and back.

The ranks of a group hold different tokens and different experts. Each rank sorts the pairs of a token and an expert by
expert, tells the others how many come (one wait for the device a layer), sends the tokens, runs its own experts on
those that arrive, sends the outputs back, and weighs and sums those of its own tokens. No pair is dropped, and none is
padded. The backward pass sends the gradients the same ways in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from harness.config.model.shares import Stretch
from harness.parallel.collectives.of_group import gathered
from harness.parallel.comm import Context, TensorParallel, apply, exchange_in_group

RunExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Runs experts: hidden states [tokens, width], indices and weights of experts [tokens, k] -> [tokens, width]."""


def run_at_owners(
    experts: RunExperts,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    stretches: Sequence[Stretch],
    place: TensorParallel,
) -> Tensor:
    """Return the weighed sums of the experts' outputs for this rank's tokens, in the shape of `hidden`.

    All ranks of the group call it.

    Args:
        experts: runs this rank's experts, which it counts from 0.
        hidden: [tokens, width], or [batch, sequence, width].
        index: of the experts that each token is sent to, [tokens, k]; those outside of `stretches` add nothing.
        weights: [tokens, k].
        stretches: of experts that the ranks of the group hold, in rank order, one after the other.
        place: this rank's place in the group.
    """
    route = Route.of(index, stretches, place)
    rows = apply(_RowsOfPairs, hidden.reshape(-1, hidden.shape[-1]), route.order, index.shape[1])
    arriving = exchange_in_group(rows, route.sizes, place.group)
    if len(arriving):
        outputs = experts(arriving, route.experts.unsqueeze(1), torch.ones_like(arriving[:, :1]))
    else:  # nothing arrives: a row of zeros keeps what the other ranks' backward waits for in the graph
        one = arriving.sum(dim=0, keepdim=True)
        outputs = experts(one, route.experts.new_zeros((1, 1)), torch.ones_like(one[:, :1]))[:0]
    outputs = outputs.reshape(-1, outputs.shape[-1])
    returned = exchange_in_group(outputs, list(zip(*route.sizes, strict=True)), place.group)
    of_pairs = returned.new_zeros((index.numel(), returned.shape[1])).index_copy(0, route.order, returned)
    return (of_pairs.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype).view(hidden.shape)


@dataclass(frozen=True, kw_only=True)
class Route:
    """Which pairs of a token and an expert go where.

    Attributes:
        order: of the pairs that are sent, among all pairs of this rank, by expert.
        sizes: `sizes[i][j]` pairs go from rank i to rank j.
        experts: which of this rank's experts each pair that arrives is for, counted from 0.
    """

    order: Tensor
    sizes: list[list[int]]
    experts: Tensor

    @classmethod
    def of(cls, index: Tensor, stretches: Sequence[Stretch], place: TensorParallel) -> Route:
        """Agree on the ways of the pairs `index` [tokens, k]; all ranks of the group call it."""
        first, stop = stretches[0][0], stretches[-1][1]
        pairs = index.reshape(-1)
        expert = torch.where((pairs >= first) & (pairs < stop), pairs - first, stop - first)
        counts = pairs.new_zeros(stop - first + 1).scatter_add_(0, expert, torch.ones_like(expert))[:-1]
        assert place.group is not None
        of_all = torch.stack(list(gathered(counts, place.group)))  # [rank, expert]
        widths = [end - start for start, end in stretches]
        sizes: list[list[int]] = torch.stack([part.sum(dim=1) for part in of_all.split(widths, dim=1)], dim=1).tolist()
        own = of_all.split(widths, dim=1)[place.rank]
        experts = torch.arange(widths[place.rank], device=index.device).repeat(place.size)
        return cls(
            order=expert.argsort(stable=True)[: sum(sizes[place.rank])],
            sizes=sizes,
            experts=experts.repeat_interleave(own.reshape(-1), output_size=sum(row[place.rank] for row in sizes)),
        )


class _RowsOfPairs(torch.autograd.Function):
    """Forward: the token of each pair, [pairs, width]. Backward: a token's gradients are summed in the order of its
    pairs, so that the sum has the same bits each time."""

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, order: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.chosen = hidden.shape[0], chosen
        return hidden.index_select(0, order // chosen)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        of_pairs = grad.new_zeros((ctx.tokens * ctx.chosen, grad.shape[1])).index_copy_(0, order, grad)
        return of_pairs.view(ctx.tokens, ctx.chosen, -1).sum(dim=1), None, None
