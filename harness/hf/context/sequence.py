"""How ranks split token ids, positions and the hidden state between layers.

Each context rank has a shard of the sequence. With sequence parallelism its tensor-parallel ranks share that shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import UserError
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.payload import StagePayload, Tokens
from harness.parallel.comm import group_size
from harness.parallel.context.sequence_shards import ContextParallel, TokenRows
from harness.parallel.tensor.sequence import join_sequence, split_sequence
from harness.wording import counted


def own_tokens(tokens: Tokens, outer: OuterForward, context: ContextParallel) -> Tokens:
    """Return the tokens of this rank's shard, with their positions in the whole sequence if the model takes any."""
    positions = tokens.positions
    # Without positions a model counts from 0, which is wrong for every shard but the first.
    if positions is None and outer.takes_positions:
        positions = torch.arange(tokens.ids.shape[1], device=tokens.ids.device).expand_as(tokens.ids)
    # No layer uses masks made from these tokens. transformers looks up tokens by position, so it could not make masks
    # that keep documents apart.
    return Tokens(context.own(tokens.ids), None if positions is None else context.own(positions), is_packed=False)


def require_enough(tokens: Tokens, contexts: int, tensors: int) -> None:
    """Raise UserError for sequences so short that a rank would have no token.

    Args:
        contexts: number of context ranks.
        tensors: number of tensor-parallel ranks that share each shard; 1: they do not.
    """
    length = tokens.ids.shape[1]
    if length < contexts * tensors:
        key = "context_parallel.size" if contexts > 1 else "tensor_parallel.sequence_parallel"
        raise UserError(
            f"{key}: a sequence of {counted(length, 'token')} cannot be split over {contexts * tensors} ranks: use "
            "longer samples, or remove it"
        )


@dataclass(frozen=True)
class SharedSequence:
    """Splits and joins the hidden state between layers, where each rank holds a share of the tokens.

    Attributes:
        group: the tensor-parallel ranks that share a shard; None: each of them has the whole shard.
        context: the context ranks, each of which has a shard.
    """

    group: dist.ProcessGroup | None
    context: ContextParallel

    @property
    def size(self) -> int:
        """The number of shares of a sequence."""
        return self.context.size * group_size(self.group)

    def require_enough(self, tokens: Tokens) -> None:
        require_enough(tokens, self.context.size, group_size(self.group))

    def split(self, payload: StagePayload, tokens: Tokens) -> StagePayload:
        """Return the payload with this rank's share of its hidden state.

        Args:
            payload: its hidden state is of the whole sequence, or of this rank's shard.
            tokens: the tokens of the whole sequence.
        """
        length = tokens.ids.shape[1]
        # With unequal shares only the ids show the length of the whole sequence.
        kept = payload.tokens or (tokens if length % self.size else None)
        hidden = self.context.own(payload.hidden) if payload.hidden.shape[1] == length else payload.hidden
        return replace(payload, hidden=self.share(hidden), tokens=kept)

    def share(self, shard: Tensor) -> Tensor:
        """Return this rank's share of its context rank's hidden state [batch, tokens, width], contiguous to be sent."""
        # A view along the tokens has gaps between the rows of a batch, which point-to-point sends refuse.
        return shard.contiguous() if self.group is None else split_sequence(shard, self.group)

    def length(self, payload: StagePayload) -> int:
        """Return the length of the whole sequence."""
        if payload.tokens is not None:
            return payload.tokens.ids.shape[1]
        return payload.hidden.shape[1] * self.size

    def shard_length(self, payload: StagePayload) -> int:
        start, stop = self.context.token_range(self.length(payload))
        return stop - start

    def as_whole(self, payload: StagePayload) -> StagePayload:
        """Return the payload with a hidden state of the whole sequence's shape: one token expanded without a copy."""
        # Masks and rotary tables are made from its shape, dtype and device alone.
        token = payload.hidden.detach()[:, :1]
        return replace(payload, hidden=token.expand(-1, self.length(payload), *token.shape[2:]))

    def join(self, payload: StagePayload) -> StagePayload:
        """Return the payload with the hidden state of this rank's shard, joined from the tensor-parallel shares."""
        if self.group is None:
            return payload
        return replace(payload, hidden=join_sequence(payload.hidden, self.shard_length(payload), self.group))

    def rows(self, whole: Tensor) -> TokenRows:
        """Return the `TokenRows` for sequences like `whole`, a hidden state [batch, whole sequence, width]."""
        return TokenRows(context=self.context, batch=whole.shape[0], length=whole.shape[1])

    def join_all(self, payload: StagePayload) -> StagePayload:
        """Return the payload with the whole sequence's hidden state, joined from the shares of all ranks."""
        joined = self.join(payload)
        return replace(joined, hidden=self.context.join(joined.hidden, self.length(payload)))
