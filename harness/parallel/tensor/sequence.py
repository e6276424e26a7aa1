"""Sequence parallelism: outside its blocks, a layer computes a shard of the tokens on each tensor-parallel rank.

After Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2. A hidden state [batch, sequence, width] is a *share* if
a rank holds only its part of the sequence. Shares are all-gathered before a block and reduce-scattered after it.
Together that sends as much as one all-reduce, and the layers between the blocks (norms, dropout, residuals) are
computed and stored once, not on every rank. The first ranks hold one more token if the group size does not divide the
sequence. A hidden state may also have the shape [batch * sequence, width].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.sharding import shard_range
from harness.parallel.comm import (
    Context,
    MoveShards,
    SplitToGroup,
    apply,
    group_rank,
    group_size,
    join_shards,
    own_shard,
    start_sum_of_shard,
    sum_of_shard,
)
from harness.parallel.compiling import Eager
from harness.parallel.tensor.shared_input import SharedInput, attach, forget, keep_copy
from harness.parallel.weight_gradients import accumulate


@dataclass
class SequenceShare:
    """How tensor-parallel ranks split the hidden state of the running layer.

    Attributes:
        group: the tensor-parallel ranks.
        batch, length, width: the shape of the whole hidden state.
        gathered: the last gathered share and its result, so that several layers gather it once.
    """

    group: dist.ProcessGroup
    batch: int = 0
    length: int = 0
    width: int = 0
    gathered: tuple[Tensor, SharedInput] | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of tokens of a sequence on each rank."""
        return widths_of(self.length, self.group)

    @contextmanager
    def forward_of(self, share: Tensor, length: int) -> Iterator[None]:
        """Enter a forward of the layer with `share` [batch, own tokens, width] of sequences of `length` tokens."""
        self.batch = share.shape[0]
        self.length = length
        self.width = share.shape[-1]
        try:
            yield
        finally:
            # Otherwise the whole hidden state would stay in memory.
            self.gathered = None

    def is_share(self, x: object) -> bool:
        """Return whether `x` is a hidden state of this rank's tokens."""
        return self._is_hidden(x, self.widths[group_rank(self.group)])

    def is_whole(self, x: object) -> bool:
        """Return whether `x` is a hidden state of all tokens."""
        return self._is_hidden(x, self.length)

    def gather(self, share: Tensor) -> Tensor:
        """All-gather the hidden state [batch, sequence, width]; each share is gathered once.

        Column-parallel layers that take it directly produce partial gradients, which are reduce-scattered. Any other
        gradient must be whole; each rank keeps its share.
        """
        return _gather_once(self, share)

    def scatter(self, partial: Tensor) -> Tensor:
        """Reduce-scatter a partial hidden state [batch, sequence, width] to this rank's share."""
        share = apply(_ScatterSequence, self.with_batch(partial), self.group, self.widths, 1)
        return share.flatten(0, 1) if partial.dim() == 2 else share

    def split(self, whole: Tensor) -> Tensor:
        """Return this rank's share of a hidden state [batch, sequence, width] replicated on all ranks."""
        share = split_sequence(self.with_batch(whole), self.group)
        return share.flatten(0, 1) if whole.dim() == 2 else share

    def _is_hidden(self, x: object, tokens: int) -> bool:
        # By its shape, because hooks see all inputs and outputs of a block: masks, rotary tables, router scores.
        shapes = ((self.batch, tokens, self.width), (self.batch * tokens, self.width))
        return isinstance(x, Tensor) and x.is_floating_point() and tuple(x.shape) in shapes

    def with_batch(self, x: Tensor) -> Tensor:
        """Return `x`, [batch, tokens, width] or flat [batch * tokens, width], as [batch, tokens, width]."""
        return x.unflatten(0, (self.batch, -1)) if x.dim() == 2 else x


def widths_of(length: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return each rank's number of entries of a dimension of `length` entries: tokens of a sequence, logits."""
    size = group_size(group)
    return tuple(stop - start for start, stop in (shard_range(length, rank, size) for rank in range(size)))


def split_sequence(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of [batch, sequence, ...]. Backward: all-gather the gradient."""
    return apply(_SplitSequence, whole, group, widths_of(whole.shape[1], group), 1)


def join_sequence(share: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather shares [batch, tokens, ...] of sequences of `length` tokens.

    Backward: keep this rank's share of the gradient, which must be whole.
    """
    return _gather(share, group, widths_of(length, group), SharedInput())[0]


@Eager
def _gather_once(to: SequenceShare, share: Tensor) -> Tensor:
    if not to.gathered or to.gathered[0] is not share:
        shared = SharedInput()
        both = _gather(to.with_batch(share), to.group, to.widths, shared)
        shared.tensors += [whole.flatten(0, 1) if share.dim() == 2 else whole for whole in both]
        to.gathered = (share, shared)
    shared = to.gathered[1]
    # The next column-parallel layer takes output 1, whose partial gradient is summed in the backward.
    if shared.tensors[0].requires_grad:
        keep_copy(shared, to.group)
    return shared.tensors[0]


def _gather(
    share: Tensor, group: dist.ProcessGroup, widths: tuple[int, ...], shared: SharedInput
) -> tuple[Tensor, Tensor]:
    both: tuple[Tensor, Tensor] = _GatherSequence.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        share, group, widths, shared
    )
    return both


class _GatherSequence(torch.autograd.Function):
    """Returns the whole hidden state twice: one output for whole gradients, one for partial gradients."""

    @staticmethod
    def forward(
        ctx: Context, share: Tensor, group: dist.ProcessGroup, widths: tuple[int, ...], shared: SharedInput
    ) -> tuple[Tensor, Tensor]:
        # The gradient of an unused output stays None: zeros would be reduce-scattered for nothing.
        ctx.set_materialize_grads(False)
        ctx.group = group
        ctx.widths = widths
        attach(ctx, shared)
        whole = join_shards(share, group, widths)
        # Detached, so that the two outputs are two tensors for autograd.
        return whole, whole.detach()

    @staticmethod
    def backward(
        ctx: Context, whole_grad: Tensor | None, partial_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        forget(ctx)
        grads = [] if whole_grad is None else [own_shard(whole_grad, ctx.group, ctx.widths)]
        if partial_grad is not None:
            share = start_sum_of_shard(partial_grad, ctx.group, ctx.widths)
            # Weight gradients are computed while the reduce-scatter is under way.
            accumulate(ctx.products)
            grads.append(share())
        return sum(grads[1:], grads[0]) if grads else None, None, None, None


class _ScatterSequence(MoveShards):
    forth, back = staticmethod(sum_of_shard), staticmethod(join_shards)


class _SplitSequence(SplitToGroup):
    """The same as its base, under the name by which a walk over the graph finds where the sequence is split."""
