"""Gradients in 8 or 4 bits, in blocks of 128 numbers with one scale.

A block is one row of bytes: its scale in float32, then the numbers. A block with a number that is not finite becomes
NaN as a whole, so that the overflow is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Number of gradient elements that share a scale."""
_SCALE_BYTES = 4


def row_bytes(bits: int) -> int:
    """Return the bytes of a block as it is sent."""
    return _SCALE_BYTES + BLOCK * bits // 8


def quantize(blocks: Tensor, bits: int) -> Tensor:
    """Return rows of bytes [n, row_bytes] for float32 `blocks` [n, BLOCK], rounded to one of 255 or 15 values."""
    most = 2 ** (bits - 1) - 1
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest.isfinite(), largest / most, torch.nan)
    # A zero block gives 0 / 0 here. If a block is not finite, its NaN scale alone makes it NaN again, whatever its
    # steps are.
    steps = (blocks / scale).nan_to_num_(nan=0.0).round_().clamp_(-most, most)
    rows = torch.empty(len(blocks), row_bytes(bits), dtype=torch.uint8, device=blocks.device)
    rows[:, :_SCALE_BYTES] = scale.view(torch.uint8)
    if bits == 8:
        rows[:, _SCALE_BYTES:] = steps.to(torch.int8).view(torch.uint8)
    else:
        halves = steps.add_(8).to(torch.uint8)  # -7 to 7 become 1 to 15: 4 bits without a sign
        rows[:, _SCALE_BYTES:] = halves[:, ::2] | (halves[:, 1::2] << 4)
    return rows


def dequantize(rows: Tensor, bits: int) -> Tensor:
    """Return the float32 blocks [n, BLOCK] of rows of bytes [n, row_bytes]."""
    scale = rows[:, :_SCALE_BYTES].contiguous().view(torch.float32)
    body = rows[:, _SCALE_BYTES:]
    if bits == 8:
        return body.view(torch.int8).float().mul_(scale)
    pairs = torch.stack((body & 15, body >> 4), dim=-1)
    return pairs.view(len(rows), BLOCK).float().sub_(8).mul_(scale)


def wire_share(bits: int) -> float:
    """Return the bytes that a rank sends, as a fraction of those of a ring all-reduce in float32."""
    return row_bytes(bits) / (4 * BLOCK)
