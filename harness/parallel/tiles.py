"""The interface of a loss that the last layer computes for one *tile* of the tokens at a time.

So logits never exist for more than one tile. `harness/context_parallel/tiles.py` computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

OfTile: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""Maps the logits [batch, tokens, vocabulary] of tokens `start` to `stop` - 1, start and stop to their summed loss."""


class LossTiles(Protocol):
    """Makes the model's last layer compute the loss tile by tile instead of returning logits.

    Attributes:
        loss: computes the loss of a tile of the current micro-batch; if None, the layer returns logits.
    """

    loss: OfTile | None

    def sum(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the summed loss of all tokens, a scalar.

        Args:
            hidden: [batch, tokens, width].
            logits_of: returns the logits of a tile of `hidden`.
        """
