"""Rounding to e4m3 as operations of torch, each of which is one kernel on a GPU with Triton.

So a dry run, whose tensors have no values, sees what a GPU computes. Elsewhere they are made of torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.extras.fp8 import e4m3, kernels
from harness.extras.fp8.e4m3 import Codes
from harness.extras.fp8.kernels import AT_ONCE as AT_ONCE

_LIBRARY = torch.library.Library("harness", "FRAGMENT")
_LIBRARY.define("fp8_codes(Tensor[] matrices, Tensor? largest, bool columns) -> Tensor[]")
_LIBRARY.define("fp8_largest(Tensor[] matrices) -> Tensor")


def round_rows(matrices: Sequence[Tensor], largest: Tensor | None = None) -> Codes:
    """Return the codes of up to `AT_ONCE` matrices [m, k] side by side, whose rows have one scale each.

    Args:
        largest: the `largest_of_rows` [m, 1], where other ranks have a part of each row; None: of these matrices.
    """
    return Codes(*torch.ops.harness.fp8_codes(list(matrices), largest, columns=False))


def round_rows_and_columns(matrices: Sequence[Tensor], largest: Tensor | None = None) -> tuple[Codes, Codes]:
    """Return the same, and the codes of the transposed matrices [k, m], whose rows have one scale each, too."""
    codes, factors, of_columns, column_factors = torch.ops.harness.fp8_codes(list(matrices), largest, columns=True)
    return Codes(codes, factors), Codes(of_columns, column_factors)


def largest_of_rows(matrices: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute element [m, 1] of each row of up to `AT_ONCE` matrices side by side, in float32."""
    found: Tensor = torch.ops.harness.fp8_largest(list(matrices))
    return found


def _codes(matrices: list[Tensor], largest: Tensor | None, columns: bool) -> list[Tensor]:
    if not kernels.usable(matrices[0].device):
        return e4m3.rounded(matrices, largest, columns)
    found = e4m3.empty(matrices, columns)
    kernels.write_codes(matrices, largest, found)
    return found


def _largest(matrices: list[Tensor]) -> Tensor:
    if not kernels.usable(matrices[0].device):
        return e4m3.largest_of(matrices)
    found = _empty_largest(matrices)
    kernels.write_largest(matrices, found)
    return found


def _empty_codes(matrices: list[Tensor], largest: Tensor | None, columns: bool) -> list[Tensor]:  # noqa: ARG001
    return e4m3.empty(matrices, columns)


def _empty_largest(matrices: list[Tensor]) -> Tensor:
    return matrices[0].new_empty((len(matrices[0]), 1), dtype=torch.float32)


_LIBRARY.impl("fp8_codes", _codes, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_largest", _largest, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_codes", _empty_codes, "Meta")
_LIBRARY.impl("fp8_largest", _empty_largest, "Meta")
