"""Which data-parallel ranks hold other experts, and the interface by which tokens reach them.

`harness/extras/expert_exchange/` sends the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from harness.config.model.sharding import Range
from harness.parallel.comm import ALONE, TensorParallel

RunExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps hidden states [tokens, width], expert indices and weights [tokens, k] to outputs [tokens, width]."""

RunAtOwners: TypeAlias = Callable[[RunExperts, Tensor, Tensor, Tensor], Tensor]
"""Runs experts on the tokens of all ranks: each token goes to the ranks of its experts, and their outputs come back.

Arguments: what runs this rank's experts, which it counts from 0; hidden states [tokens, width] or
[batch, sequence, width]; the experts of each token and their weights, both [tokens, k]. Returns the weighted sums of
the outputs in the shape of the hidden states. All ranks call it.
"""


class ExchangeTokens(Protocol):
    """Prepares the exchange of one module of experts."""

    def __call__(
        self,
        experts: nn.Module,
        ranges: Sequence[Range],
        neighbours: Neighbours,
        *,
        block: nn.Module | None,
        width: int,
    ) -> RunAtOwners:
        """Return what runs the experts.

        Args:
            experts: the module.
            ranges: (first, stop) of the experts of each rank, in rank order and without gaps.
            block: the module that calls the experts, some of whose other modules may run while tokens travel; None if
                they may not.
            width: the width of the hidden state.
        """


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The data-parallel ranks over which experts are distributed.

    Attributes:
        ranks: these ranks, and this rank's place among them.
        pieces: number of pieces in which the tokens of a layer travel, one after the other.
        exchange: sends tokens between several ranks.
    """

    ranks: TensorParallel = ALONE
    pieces: int = 1
    exchange: ExchangeTokens | None = None


NO_NEIGHBOURS = Neighbours()
