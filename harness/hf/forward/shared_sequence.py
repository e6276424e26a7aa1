"""The hidden state between pipeline layers where tensor-parallel ranks share its sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from harness.errors import UserError
from harness.hf.forward.payload import StagePayload, Tokens
from harness.parallel.comm import group_size
from harness.parallel.tensor.sequence import join_sequence, split_sequence
from harness.wording import counted


@dataclass(frozen=True)
class SharedSequence:
    """What decoder layers pass on where each rank of `group` has a share of the tokens.

    Token ids travel as well where the shares are not equal: the length of a sequence is read from them.
    """

    group: dist.ProcessGroup

    def split(self, payload: StagePayload, tokens: Tokens) -> StagePayload:
        """Return what is passed on with this rank's share of the hidden state, which was made of `tokens`."""
        length, size = payload.hidden.shape[1], group_size(self.group)
        if length < size:
            raise UserError(
                f"tensor_parallel.sequence_parallel: a sequence of {counted(length, 'token')} cannot be split "
                f"over {size} ranks: use longer samples, or remove it"
            )
        kept = payload.tokens or (tokens if length % size else None)
        return replace(payload, hidden=split_sequence(payload.hidden, self.group), tokens=kept)

    def length(self, payload: StagePayload) -> int:
        """Return the length of the whole sequence."""
        if payload.tokens is not None:
            return payload.tokens.ids.shape[1]
        return payload.hidden.shape[1] * group_size(self.group)

    def as_whole(self, payload: StagePayload) -> StagePayload:
        """Return the same with a hidden state of the whole one's shape and dtype, which takes no memory."""
        token = payload.hidden.detach()[:, :1]
        return replace(payload, hidden=token.expand(-1, self.length(payload), *token.shape[2:]))

    def join(self, payload: StagePayload) -> StagePayload:
        """Return the same with the whole hidden state."""
        return replace(payload, hidden=join_sequence(payload.hidden, self.length(payload), self.group))
