"""Send tokens to the ranks of their experts, and the outputs back (expert parallelism over data ranks).

The ranks of a group hold different tokens and different experts. A token routed to k experts makes k (token, expert)
pairs. For each layer a rank

1. sorts its pairs by expert, and exchanges the number of pairs per expert (one wait for the device);
2. sends the tokens of its pairs;
3. runs its own experts on the tokens that arrive, and sends the outputs back;
4. returns the weighted sum of the k outputs of each token.

No pair is dropped or padded. The backward pass sends gradients along the same routes in reverse.

A rank waits for tokens only when it needs them. Meanwhile it runs the modules of its block that need no routed tokens
(`early_modules.py`) and, if tokens travel in several pieces, its experts on another piece. Autograd runs a graph
from its end, so gradients travel during the backward of the same computations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.model.sharding import Range
from harness.extras.expert_exchange.early_modules import EarlyModules
from harness.parallel.collectives import all_gather, start_all_to_all
from harness.parallel.comm import Context, TensorParallel, apply
from harness.parallel.compiling import Eager
from harness.parallel.token_exchange import Neighbours, RunAtOwners, RunExperts


def exchange_tokens(
    experts: nn.Module, ranges: Sequence[Range], neighbours: Neighbours, *, block: nn.Module | None, width: int
) -> RunAtOwners:
    """Return what runs `experts` at the ranks that hold them (`ExchangeTokens`)."""
    early = None if block is None else EarlyModules(block, experts, width)

    def run(run_experts: RunExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        meanwhile = None if early is None else early.run
        return run_at_owners(
            run_experts, hidden, index, weights, ranges=ranges, neighbours=neighbours, meanwhile=meanwhile
        )

    return run


@Eager
def run_at_owners(
    experts: RunExperts,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    ranges: Sequence[Range],
    neighbours: Neighbours,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Return the weighted sum of the experts' outputs for each of this rank's tokens, in the shape of `hidden`.

    All ranks of the group call it.

    Args:
        experts: runs this rank's experts, which it counts from 0.
        hidden: [tokens, width], or [batch, sequence, width].
        index: the experts of each token, [tokens, k]; pairs with an expert outside `ranges` add nothing.
        weights: the weights of these pairs in the sum, [tokens, k].
        ranges: (first, stop) of the experts of each rank of the group, in rank order and without gaps.
        meanwhile: called while the first tokens travel.
    """
    pieces = neighbours.pieces
    group = neighbours.ranks.group
    assert group is not None
    # One exchange of counts for all pieces, as each makes the host wait for the device.
    routes = Route.of(index.tensor_split(pieces), ranges, neighbours.ranks)
    on_their_way = []
    for rows, route in zip(hidden.reshape(-1, hidden.shape[-1]).tensor_split(pieces), routes, strict=True):
        on_their_way.append(RowExchange(apply(_RowsOfPairs, rows, route.order, index.shape[1]), route.sizes, group))
    if meanwhile is not None:
        meanwhile()
    returning = []
    for exchange, route in zip(on_their_way, routes, strict=True):
        back = [list(sizes) for sizes in zip(*route.sizes, strict=True)]
        returning.append(RowExchange(_outputs(experts, exchange.end(), route.experts), back, group))
    parts = zip(returning, routes, weights.tensor_split(pieces), strict=True)
    sums = [_weighed(exchange.end(), route.order, share) for exchange, route, share in parts]
    return (sums[0] if pieces == 1 else torch.cat(sums)).to(hidden.dtype).view(hidden.shape)


def _outputs(experts: RunExperts, arriving: Tensor, index: Tensor) -> Tensor:
    """Return the outputs [pairs, width] of this rank's experts for the tokens `arriving` [pairs, width].

    Args:
        index: the expert of each pair, counted from this rank's first, [pairs].
    """
    if len(arriving):
        # Weight 1 here: the sender multiplies by the router's weights, whose gradient its own router needs.
        outputs = experts(arriving, index.unsqueeze(1), torch.ones_like(arriving[:, :1]))
    else:  # a row of zeros keeps experts and exchange in the graph, since other ranks' backward waits for this one's
        one = arriving.sum(dim=0, keepdim=True)
        outputs = experts(one, index.new_zeros((1, 1)), torch.ones_like(one[:, :1]))[:0]
    return outputs.reshape(-1, outputs.shape[-1])


def _weighed(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums [tokens, width] of the pairs' outputs; `weights` are [tokens, k].

    Args:
        outputs: [pairs, width], in the order in which the pairs were sent.
        order: index of each of these among all tokens x k pairs, [pairs].
    """
    of_pairs = outputs.new_zeros((weights.numel(), outputs.shape[1])).index_copy(0, order, outputs)
    return (of_pairs.view(*weights.shape, outputs.shape[1]) * weights.unsqueeze(-1)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Route:
    """Destinations of (token, expert) pairs.

    Attributes:
        order: indices of this rank's pairs in sending order, sorted by expert, [pairs sent].
        sizes: `sizes[i][j]` pairs go from rank i to rank j.
        experts: the expert of each arriving pair, counted from this rank's first, [pairs arriving].
    """

    order: Tensor
    sizes: list[list[int]]
    experts: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Tensor], ranges: Sequence[Range], ranks: TensorParallel) -> list[Route]:
        """Return the route of each piece from the experts [tokens, k] of its tokens; all ranks call it."""
        assert ranks.group is not None
        first = ranges[0][0]
        stop = ranges[-1][1]
        widths = [end - start for start, end in ranges]
        experts, counts = [], []
        for piece in pieces:
            pairs = piece.reshape(-1)
            # Experts outside `ranges` (of other tensor-parallel ranks) sort behind all others, where `order` ends.
            expert = torch.where((pairs >= first) & (pairs < stop), pairs - first, stop - first)
            experts.append(expert)
            counts.append(pairs.new_zeros(stop - first + 1).scatter_add_(0, expert, torch.ones_like(expert))[:-1])
        of_all = torch.stack(list(all_gather(torch.stack(counts), ranks.group)), dim=1)  # [piece, rank, expert]
        shares = of_all.split(widths, dim=2)
        all_sizes: list[list[list[int]]] = torch.stack([share.sum(dim=2) for share in shares], dim=2).tolist()
        own = torch.arange(widths[ranks.rank], device=of_all.device).repeat(ranks.size)
        # A stable sort: otherwise an expert might get its tokens in another order in each run, and round differently.
        return [
            cls(
                order=expert.argsort(stable=True)[: sum(sizes[ranks.rank])],
                sizes=sizes,
                experts=own.repeat_interleave(share.reshape(-1), output_size=sum(row[ranks.rank] for row in sizes)),
            )
            for expert, sizes, share in zip(experts, all_sizes, shares[ranks.rank], strict=True)
        ]


class RowExchange:
    """An all-to-all of rows [rows, width]; the backward sends the gradients in reverse."""

    def __init__(self, rows: Tensor, sizes: list[list[int]], group: dist.ProcessGroup) -> None:
        """Begin to send `rows`, sorted by receiving rank: `sizes[i][j]` go from i to j."""
        self._sizes = sizes
        self._group = group
        self._wait: Callable[[], Tensor] | None = None
        self._begun = apply(_Send, rows, self)

    def end(self) -> Tensor:
        """Wait for the rows from all ranks; return them [arrived rows, width] in rank order."""
        return apply(_Arrive, self._begun, self)

    def start(self, rows: Tensor, *, back: bool = False) -> None:
        """Begin to send rows [rows, width], or with `back`, the gradients of arrived rows to their senders."""
        sizes = [list(sizes) for sizes in zip(*self._sizes, strict=True)] if back else self._sizes
        self._wait = start_all_to_all(rows, sizes, self._group)

    def wait(self) -> Tensor:
        """Wait for the last started exchange; return the arrived rows [arrived rows, width]."""
        assert self._wait is not None
        arrived = self._wait()
        self._wait = None
        return arrived


class _Send(torch.autograd.Function):
    """Forward: begin to send; the output is a token for it in the graph. Backward: wait for the gradients."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Context, _begun: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    """Forward: wait for the rows. Backward: begin to send their gradients back."""

    @staticmethod
    def forward(ctx: Context, _begun: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grad, back=True)
        return grad.new_zeros(()), None


class _RowsOfPairs(torch.autograd.Function):
    """Forward: return the token of each pair, [pairs, width].

    Backward: sum the gradients of a token's pairs in a fixed order. On a GPU, the backward of `index_select` adds them
    in any order, so its bits differ from run to run.
    """

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, order: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens = hidden.shape[0]
        ctx.chosen = chosen
        return hidden.index_select(0, order // chosen)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        of_pairs = grad.new_zeros((ctx.tokens * ctx.chosen, grad.shape[1])).index_copy_(0, order, grad)
        return of_pairs.view(ctx.tokens, ctx.chosen, grad.shape[1]).sum(dim=1), None, None
