"""A matrix in 4 bits, as bitsandbytes quantises it, cut for a tensor-parallel rank.

bitsandbytes walks through the rows of a matrix [out, in] in blocks of 64 elements. A block has one float32 scale and a
4-bit code for each element. With double quantisation the scales have 8-bit codes, and each 256 of them one float32
scale, around the mean of them all.

A rank's part must have the values of the whole matrix, so the whole matrix is quantised and the codes are cut. A cut
through blocks leaves shorter runs of elements with one scale. Then all of this rank's blocks have the length of the
shortest run, and a scale is stored for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import bitsandbytes.functional as bnb
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK, GROUP = 64, 256
KERNEL_BLOCKS = (32, 64)
"""Lengths of blocks that the kernel of bitsandbytes dequantises."""

Take: TypeAlias = Callable[[Tensor], Tensor]
"""Cuts this rank's part out of a matrix."""


@dataclass(frozen=True, kw_only=True)
class FourBits:
    """How the bytes of a quantised matrix are read.

    The bytes are the codes of the elements, two in a byte, then the scales of the blocks. These are float32, or 8-bit
    codes followed by the float32 scales of their groups.

    Attributes:
        kind: "nf4" or "fp4".
        values: the value [16] of each 4-bit code.
        shape: [out, in] of this rank's part.
        block: number of consecutive elements that share a scale.
        group: number of consecutive scales that share a scale; 0 without double quantisation.
        scale_values: the value [256] of each 8-bit code of a scale.
        mean: mean of the scales of the whole matrix, with double quantisation.
    """

    kind: str
    values: Tensor
    shape: tuple[int, int]
    block: int
    group: int = 0
    scale_values: Tensor | None = None
    mean: float = 0.0

    def dequantise(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] of its bytes `stored` [n]."""
        elements = self.shape[0] * self.shape[1]
        codes, scales = stored.tensor_split([-(-elements // 2)])
        scale = self._scales(scales, -(-elements // self.block))
        if self.block in KERNEL_BLOCKS:
            # [n, 1], as the kernel expects them
            column = codes.unsqueeze(1)
            found: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
                column, scale, self.block, self.kind, self.shape, dtype
            )
            return found
        values = self.values[_unpacked(codes)[:elements].int()]
        return (values * scale.repeat_interleave(self.block)[:elements]).to(dtype).view(self.shape)

    def _scales(self, stored: Tensor, blocks: int) -> Tensor:
        """Return the scales [blocks] in float32."""
        if self.scale_values is None:
            return _as_float32(stored)
        codes, outer = stored.tensor_split([blocks])
        inner = self.scale_values[codes.int()]
        return inner * _as_float32(outer).repeat_interleave(self.group)[:blocks] + self.mean


def quantise(matrix: Tensor, kind: str, *, double: bool, take: Take | None = None) -> tuple[FourBits, Tensor]:
    """Quantise a whole matrix [out, in]; return how to read this rank's part, and its bytes [n].

    Args:
        double: whether the scales are quantised too.
        take: cuts this rank's part; None: all of it.
    """
    out, inputs = matrix.shape
    packed, state = bnb.quantize_4bit(matrix.contiguous(), blocksize=BLOCK, compress_statistics=double, quant_type=kind)
    codes = packed.view(-1)
    shape = (out, inputs)
    places = torch.arange(len(state.absmax), dtype=torch.int32, device=matrix.device)
    block = BLOCK
    if take is not None:
        local = take(_unpacked(codes)[: matrix.numel()].view(out, inputs))
        shape = (local.shape[0], local.shape[1])
        codes = _packed(local.reshape(-1))
        blocks = places.repeat_interleave(BLOCK)[: matrix.numel()].view(out, inputs)
        block, places = _runs(take(blocks).reshape(-1), BLOCK)
    scales = state.absmax[places]
    form = FourBits(kind=kind, values=state.code, shape=shape, block=block)
    if not double:
        return form, torch.cat([codes, _as_bytes(scales)])
    group, groups = _runs(places // GROUP, GROUP)
    form = replace(form, group=group, scale_values=state.state2.code, mean=float(state.offset))
    return form, torch.cat([codes, scales, _as_bytes(state.state2.absmax[groups])])


def reserved(shape: tuple[int, int], kind: str, *, double: bool, device: torch.device) -> tuple[FourBits, Tensor]:
    """Return what `quantise` does for a part [out, in] that is cut between blocks, without values: for a dry run."""
    elements = shape[0] * shape[1]
    blocks = -(-elements // BLOCK)
    form = FourBits(kind=kind, values=torch.empty(16, device=device), shape=shape, block=BLOCK)
    scales = 4 * blocks
    if double:
        form = replace(form, group=GROUP, scale_values=torch.empty(256, device=device))
        scales = blocks + 4 * -(-blocks // GROUP)
    return form, torch.empty(-(-elements // 2) + scales, dtype=torch.uint8, device=device)


def _runs(ids: Tensor, most: int) -> tuple[int, Tensor]:
    """Return the largest power of two up to `most` such that runs of this length have one id each, and these ids."""
    length = most
    while True:
        rows = pad(ids, (0, -len(ids) % length)).view(-1, length)
        rows[-1, len(ids) - (len(rows) - 1) * length :] = ids[-1]
        if length == 1 or torch.equal(rows, rows[:, :1].expand_as(rows)):
            return length, rows[:, 0].contiguous()
        length //= 2


def _unpacked(packed: Tensor) -> Tensor:
    """Return the codes [2 n] of bytes [n]."""
    return torch.stack([packed >> 4, packed & 15], dim=1).view(-1)


def _packed(codes: Tensor) -> Tensor:
    """Return the bytes [(n + 1) // 2] of codes [n]."""
    high, low = pad(codes, (0, len(codes) % 2)).view(-1, 2).unbind(1)
    return high << 4 | low


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _as_float32(stored: Tensor) -> Tensor:
    # a copy, as the bytes may begin at any address
    return stored.clone().view(torch.float32)
