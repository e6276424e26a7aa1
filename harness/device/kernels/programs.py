"""Triton's programs of the loss: each reads its inputs once, and writes its outputs once. They compute in float32.

Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponentials(logits, largest, sums, width, block: tl.constexpr):
    """Write the largest logit of a row, and the sum of exp(logit - largest): the row is read once.

    Source of the running sum: Milakov and Gimelshein 2018, arXiv 1805.02867.
    """
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        x = tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # a lane that has seen nothing, or -inf alone, would compute -inf - -inf
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    of_row = tl.max(top, 0)
    total = tl.sum(total * tl.exp(tl.where(top == float("-inf"), float("-inf"), top - of_row)), 0)
    tl.store(largest + row, of_row)
    tl.store(sums + row, total)


@triton.jit
def probabilities_less_label(logits, out, log_sums, labels, scales, label_scales, width, block: tl.constexpr):
    """Write scale * exp(logit - log_sum), less `label_scale` in the label's column, of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    x = tl.load(logits + row * width + column, mask=inside).to(tl.float32)
    log_sum = tl.load(log_sums + row)
    label = tl.load(labels + row)
    value = tl.exp(x - log_sum) * tl.load(scales + row)
    value -= tl.where(column == label, tl.load(label_scales + row), 0.0)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
