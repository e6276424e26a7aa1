"""Tokens that travel to the ranks of their experts, and back.

The ranks of a group hold different tokens and different experts. Each rank sorts the pairs of a token and an expert by
expert, tells the others how many come (one wait for the device a layer), sends the tokens, runs its own experts on
those that arrive, sends the outputs back, and weighs and sums those of its own tokens. No pair is dropped, and none is
padded. The backward pass sends the gradients the same ways in reverse.

A rank waits for what travels only where it needs it. Between the start and the end of a journey it runs what its block
computes of its own tokens anyhow, and, where tokens travel in several pieces, the experts on another piece. Autograd
runs the backward of what was computed later first, so that gradients travel beside the same computations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.shares import Stretch
from harness.parallel.collectives.of_group import gathered, start_exchange
from harness.parallel.comm import ALONE, Context, TensorParallel, apply
from harness.parallel.compiling import eager

RunExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Runs experts: hidden states [tokens, width], indices and weights of experts [tokens, k] -> [tokens, width]."""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The ranks on the data axis among which a rank's experts are dealt.

    Attributes:
        place: this rank's place among them.
        pieces: in which the tokens of a layer travel, one after the other.
    """

    place: TensorParallel = ALONE
    pieces: int = 1


NO_NEIGHBOURS = Neighbours()


@eager
def run_at_owners(
    experts: RunExperts,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    stretches: Sequence[Stretch],
    neighbours: Neighbours,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Return the weighed sums of the experts' outputs for this rank's tokens, in the shape of `hidden`.

    All ranks of the group call it.

    Args:
        experts: runs this rank's experts, which it counts from 0.
        hidden: [tokens, width], or [batch, sequence, width].
        index: of the experts that each token is sent to, [tokens, k]; those outside of `stretches` add nothing.
        weights: [tokens, k].
        stretches: of experts that the ranks of the group hold, in rank order, one after the other.
        meanwhile: called while the first tokens travel.
    """
    pieces, group = neighbours.pieces, neighbours.place.group
    assert group is not None
    routes = Route.of(index.tensor_split(pieces), stretches, neighbours.place)
    on_their_way = []
    for rows, route in zip(hidden.reshape(-1, hidden.shape[-1]).tensor_split(pieces), routes, strict=True):
        on_their_way.append(Journey(apply(_RowsOfPairs, rows, route.order, index.shape[1]), route.sizes, group))
    if meanwhile is not None:
        meanwhile()
    returning = []
    for journey, route in zip(on_their_way, routes, strict=True):
        back = [list(sizes) for sizes in zip(*route.sizes, strict=True)]
        returning.append(Journey(_outputs(experts, journey.end(), route.experts), back, group))
    parts = zip(returning, routes, weights.tensor_split(pieces), strict=True)
    sums = [_weighed(journey.end(), route.order, share) for journey, route, share in parts]
    return (sums[0] if pieces == 1 else torch.cat(sums)).to(hidden.dtype).view(hidden.shape)


def _outputs(experts: RunExperts, arriving: Tensor, index: Tensor) -> Tensor:
    """Return the outputs of this rank's experts for the tokens that arrive [pairs, width]."""
    if len(arriving):
        outputs = experts(arriving, index.unsqueeze(1), torch.ones_like(arriving[:, :1]))
    else:  # nothing arrives: a row of zeros keeps what the other ranks' backward waits for in the graph
        one = arriving.sum(dim=0, keepdim=True)
        outputs = experts(one, index.new_zeros((1, 1)), torch.ones_like(one[:, :1]))[:0]
    return outputs.reshape(-1, outputs.shape[-1])


def _weighed(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [tokens, width] of the outputs of pairs, which lie in `order`, by `weights` [tokens, k]."""
    of_pairs = outputs.new_zeros((weights.numel(), outputs.shape[1])).index_copy(0, order, outputs)
    return (of_pairs.view(*weights.shape, outputs.shape[1]) * weights.unsqueeze(-1)).sum(dim=1)


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
    def of(cls, pieces: Sequence[Tensor], stretches: Sequence[Stretch], place: TensorParallel) -> list[Route]:
        """Agree on the ways of pairs, whose experts [tokens, k] are given piece by piece; all ranks call it."""
        assert place.group is not None
        first, stop = stretches[0][0], stretches[-1][1]
        widths = [end - start for start, end in stretches]
        experts, counts = [], []
        for piece in pieces:
            pairs = piece.reshape(-1)
            expert = torch.where((pairs >= first) & (pairs < stop), pairs - first, stop - first)
            experts.append(expert)
            counts.append(pairs.new_zeros(stop - first + 1).scatter_add_(0, expert, torch.ones_like(expert))[:-1])
        of_all = torch.stack(list(gathered(torch.stack(counts), place.group)), dim=1)  # [piece, rank, expert]
        shares = of_all.split(widths, dim=2)
        all_sizes: list[list[list[int]]] = torch.stack([share.sum(dim=2) for share in shares], dim=2).tolist()
        own = torch.arange(widths[place.rank], device=of_all.device).repeat(place.size)
        return [
            cls(
                order=expert.argsort(stable=True)[: sum(sizes[place.rank])],
                sizes=sizes,
                experts=own.repeat_interleave(share.reshape(-1), output_size=sum(row[place.rank] for row in sizes)),
            )
            for expert, sizes, share in zip(experts, all_sizes, shares[place.rank], strict=True)
        ]


class Journey:
    """Rows on their way to other ranks, and later their gradients on the way back."""

    def __init__(self, rows: Tensor, sizes: list[list[int]], group: dist.ProcessGroup) -> None:
        """Begin to send each rank its run of `rows`; `sizes[i][j]` are those that rank i sends to rank j."""
        self._sizes, self._group = sizes, group
        self._wait: Callable[[], Tensor] | None = None
        self._begun = apply(_Send, rows, self)

    def end(self) -> Tensor:
        """Return the rows from all ranks, in their order; their gradients go back."""
        return apply(_Arrive, self._begun, self)

    def start(self, rows: Tensor, *, back: bool = False) -> None:
        """Begin to send rows, or gradients of those that arrived, back to where they came from."""
        sizes = [list(sizes) for sizes in zip(*self._sizes, strict=True)] if back else self._sizes
        self._wait = start_exchange(rows, sizes, self._group)

    def wait(self) -> Tensor:
        """Return what comes from all ranks, of what has begun last."""
        assert self._wait is not None
        arrived, self._wait = self._wait(), None
        return arrived


class _Send(torch.autograd.Function):
    """Forward: begin to send; the output stands for it in the graph. Backward: wait for the gradients."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.start(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Context, _begun: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.wait(), None


class _Arrive(torch.autograd.Function):
    """Forward: wait for the rows. Backward: begin to send their gradients back."""

    @staticmethod
    def forward(ctx: Context, _begun: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.wait()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        ctx.journey.start(grad, back=True)
        return grad.new_zeros(()), None


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
        return of_pairs.view(ctx.tokens, ctx.chosen, grad.shape[1]).sum(dim=1), None, None
