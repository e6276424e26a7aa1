"""Context ranks: which tokens of a sequence each keeps, and how ranks join them.

The tokens that a rank keeps are its *shard*. If the number of ranks does not divide the length of the sequence, the
first ranks keep one token more.

Context ranks are data-parallel ranks: each rank's loss counts its own tokens, and DeepSpeed sums the gradients of all
ranks. So a gradient here belongs to one rank's loss. A tensor made from the tokens of all ranks has such a partial
gradient on every rank, and the backward of `join` sums them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from harness.config.model.sharding import Range, shard_range
from harness.parallel.comm import MoveShards, apply, group_rank, group_size, join_shards, sum_of_shard


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
        # A rank's loss counts only its own tokens, so the gradient of the joined tensor is partial: see the module's
        # docstring.
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
