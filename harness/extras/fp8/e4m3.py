"""Matrices in e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), by torch's operations.

Each row has a scale of its own, found anew each time: the largest power of two with which no element exceeds the range.
A product with it is exact, so codes are rounded once, and its inverse is exact, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.config.values.arguments import FP8_MULTIPLE

E4M3 = torch.float8_e4m3fn
RANGE = 0.875, 9
"""Mantissa and exponent of the largest number of e4m3: 448 = 0.875 * 2**9."""
SMALLEST = 1e-12
"""The least that a row's largest element is taken for: rows of zeros have a scale, too."""


class Codes(NamedTuple):
    """A matrix [m, k]: its element in row i is codes[i, j] * factors[i].

    Attributes:
        codes: [m, k], e4m3; k is padded with zeros to a multiple of `FP8_MULTIPLE`.
        factors: [m, 1], float32; powers of two, or NaN for a row whose elements are not all finite.
    """

    codes: Tensor
    factors: Tensor


def largest_of(matrices: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute element [m, 1] of each row of matrices [m, k] side by side, in float32."""
    each = [matrix.abs().amax(dim=1, keepdim=True) for matrix in matrices]
    return torch.cat(each, dim=1).amax(dim=1, keepdim=True).float()


def rounded(matrices: Sequence[Tensor], largest: Tensor | None, columns: bool) -> list[Tensor]:
    """Return codes and factors of matrices [m, k] side by side; with `columns` also those of their transposed form.

    `largest`: the `largest_of` of each row, where other ranks have a part of it.
    """
    whole = torch.cat(list(matrices), dim=1)
    found = list(_codes(whole, largest_of([whole]) if largest is None else largest))
    if columns:
        whole = whole.t().contiguous()
        found += _codes(whole, largest_of([whole]))
    return found


def empty(matrices: Sequence[Tensor], columns: bool) -> list[Tensor]:
    """Return tensors for what `rounded` returns, without values."""
    rows = matrices[0].shape[0]
    width = sum(matrix.shape[1] for matrix in matrices)
    shapes = [(rows, width), (width, rows)] if columns else [(rows, width)]
    found = []
    for m, k in shapes:
        found.append(matrices[0].new_empty((m, k + -k % FP8_MULTIPLE), dtype=E4M3))
        found.append(matrices[0].new_empty((m, 1), dtype=torch.float32))
    return found


def _codes(matrix: Tensor, largest: Tensor) -> Codes:
    mantissa, exponent = torch.frexp(largest.clamp(min=SMALLEST))
    power = torch.exp2((RANGE[1] - exponent - (mantissa > RANGE[0]).int()).float())
    scale = torch.where(largest.isfinite(), power, torch.nan)
    codes = (matrix.float() * scale).to(E4M3).view(torch.uint8)  # there is no `pad` of e4m3
    return Codes(pad(codes, (0, -codes.shape[1] % FP8_MULTIPLE)).view(E4M3), 1 / scale)
