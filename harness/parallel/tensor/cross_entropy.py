"""Cross entropy over logits whose vocabulary is split over a tensor-parallel group.

No rank ever sees another's logits: the ranks exchange one maximum and two sums a token. Megatron-LM calls it
vocabulary-parallel cross entropy (Shoeybi et al. 2019, arXiv 1909.08053, section 3). For rows of logits z
with label y

    loss = log(sum_v exp(z_v)) - z_y        d loss / d z_v = exp(z_v) / sum_u exp(z_u) - [v = y]
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.shares import stretch
from harness.parallel.comm import Context, apply, group_rank, group_size, max_over_group, sum_over_group


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    ignore_index: int = -100,
) -> Tensor:
    """Return the loss of every token, float32, shaped as `labels` (...), 0 where the label is `ignore_index`.

    `logits` (..., n) are this rank's stretch of the vocabulary, as `shard.share_of` deals it out. The sums are made in
    float32 whatever the dtype of the logits; their gradient has that dtype. A label outside of the vocabulary is a
    RuntimeError, another width a ValueError.
    """
    return apply(_VocabParallelCrossEntropy, logits, labels, group, vocab_size, ignore_index)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        ignore_index: int,
    ) -> Tensor:
        ignored = labels == ignore_index
        inside = (labels >= 0) & (labels < vocab_size)
        torch._assert_async((inside | ignored).all(), "a label is outside the vocabulary")  # noqa: SLF001  # no public name
        first, stop = stretch(vocab_size, group_rank(group), group_size(group))
        if logits.shape[-1] != stop - first:
            raise ValueError(f"got {logits.shape[-1]} columns of logits, expected {stop - first}")
        column = labels - first
        here = (column >= 0) & (column < stop - first) & ~ignored
        column = column.masked_fill(~here, 0)

        own = logits.float()
        largest = max_over_group(own.amax(-1), group)
        own = own - largest.unsqueeze(-1)
        label_logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).float() - largest
        sums = torch.stack([own.exp().sum(-1), label_logit.masked_fill(~here, 0.0)])
        exp_sum, label_logit = sum_over_group(sums, group).unbind(0)

        # The exponentials are made again in the backward: a second float32 copy of the logits is not kept.
        ctx.save_for_backward(logits, largest + exp_sum.log(), column, here, ignored)
        return (exp_sum.log() - label_logit).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, column, here, ignored = ctx.saved_tensors
        scale = grad.float().masked_fill(ignored, 0.0).unsqueeze(-1)
        grad_logits = (logits.float() - log_sum.unsqueeze(-1)).exp_() * scale
        grad_logits.scatter_add_(-1, column.unsqueeze(-1), -scale * here.unsqueeze(-1))
        return grad_logits.to(logits.dtype), None, None, None, None
