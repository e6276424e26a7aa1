"""What is reported of the logits of each token: their mean, their entropy, and whether the label is the most probable.

The vocabulary may be split over a tensor-parallel group: its ranks exchange a maximum and four sums a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.model.sharding import shard_range
from harness.parallel.comm import group_rank, group_size, max_over_group, sum_over_group
from harness.parallel.tensor.cross_entropy import in_chunks

NUMBERS = ("logits", "entropy", "correct")


@torch.no_grad()
def token_numbers(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, vocab_size: int) -> Tensor:
    """Return NUMBERS of every token, float32 [3, ...]; `correct` is 1 or 0, and means nothing without a label.

    Args:
        logits: [..., n], this rank's part of the vocabulary; `group` is None if it is the whole one.
        labels: [...], indices into the whole vocabulary, or -100.
    """
    first = 0 if group is None else shard_range(vocab_size, group_rank(group), group_size(group))[0]
    column = labels - first
    here = (column >= 0) & (column < logits.shape[-1])
    column = column.masked_fill(~here, 0).unsqueeze(-1)
    label_logit = logits.gather(-1, column).squeeze(-1).float().masked_fill(~here, 0.0)
    top = max_over_group(logits.amax(-1).float(), group)
    sums = top.new_empty(3, *top.shape)
    for rows, largest, total, exp_sum, weighted in in_chunks(logits, top, *sums):
        total.copy_(rows.sum(-1, dtype=torch.float32))
        values = rows.float() - largest.unsqueeze(-1)  # never in place: float32 rows are the logits themselves
        exponentials = values.exp()
        exp_sum.copy_(exponentials.sum(-1))
        weighted.copy_(values.mul_(exponentials).sum(-1))
    total, exp_sum, weighted, label_logit = sum_over_group(torch.cat([sums, label_logit.unsqueeze(0)]), group)
    return torch.stack([total / vocab_size, exp_sum.log() - weighted / exp_sum, (label_logit == top).float()])
