"""Kernels for GPUs, in Triton, that round matrices to e4m3: one finds all scales and writes all codes.

torch takes eight operations for the rows of a matrix, and as many for its columns. `usable` says whether the kernels
run on a device and give torch's codes there; callers ask it, and use torch if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from harness.device.kernels import runs
from harness.extras.fp8 import e4m3

AT_ONCE = 3
"""Most matrices of a kernel."""
BLOCK = 1024
"""Elements of a row that a program reads at a time."""
FEW_COLUMNS = 8192
"""Up to so many columns a program rounds few of them at a time, or there were too few programs for a GPU."""


@cache
@torch.inference_mode(mode=False)
@torch.no_grad()
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on `device`, which the first call tries: they must give torch's codes there."""
    return runs(device, _try)


def _try(device: torch.device) -> None:
    """Raise an error if a kernel does not run on `device`, or gives other codes than torch."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn((5, 16), generator=generator).bfloat16().to(device) for _ in range(2)]
    transposed = [matrix.t() for matrix in matrices]
    for given, columns in ((matrices, True), (transposed, False)):
        wanted = e4m3.rounded(given, None, columns)
        found = e4m3.empty(given, columns)
        write_codes(given, None, found)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.view(torch.uint8), theirs.view(torch.uint8), rtol=0, atol=0)


@cache
def _programs() -> ModuleType:
    return import_module("harness.extras.fp8.programs")


def write_codes(matrices: Sequence[Tensor], largest: Tensor | None, outputs: Sequence[Tensor]) -> None:
    """Write what `e4m3.rounded` returns to `outputs`, which `e4m3.empty` has made; at most `AT_ONCE` matrices."""
    codes, factors, *of_columns = outputs
    rows = matrices[0].shape[0]
    length = codes.shape[1]
    given = factors if largest is None else largest.contiguous()  # factors: a pointer that is not read
    options = {"is_given": largest is not None, "by_hand": codes.device.type == "cpu"}
    if _are_transposed(matrices) and not of_columns:
        stacked = [matrix.t() for matrix in matrices]
        tile = _tile(rows)
        _programs().by_column[(_parts(rows, tile["wide"]),)](
            *_three(stacked, 0), rows, given, codes, factors, length, **options, **tile
        )
        return
    side_by_side = _three([matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in matrices], 1)
    column_codes, column_factors = of_columns or (codes, factors)
    tile = _tile(length)
    programs = [_parts(matrix.shape[1], tile["wide"]) if of_columns else 0 for matrix in matrices]
    of_a, of_b, *_ = (*programs, 0)
    _programs().by_row[(sum(programs) + rows,)](
        *side_by_side,
        rows,
        given,
        codes,
        factors,
        length,
        column_codes,
        column_factors,
        column_codes.shape[1],
        of_a,
        of_b,
        sum(programs),
        block=BLOCK,
        **options,
        **tile,
    )


def write_largest(matrices: Sequence[Tensor], out: Tensor) -> None:
    """Write what `e4m3.largest_of` returns to `out` [m, 1], float32; at most `AT_ONCE` matrices."""
    rows = matrices[0].shape[0]
    if _are_transposed(matrices):
        tile = _tile(rows)
        grid = (_parts(rows, tile["wide"]),)
        _programs().column_maxima[grid](*_three([matrix.t() for matrix in matrices], 0), rows, out, **tile)
        return
    dense = [matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in matrices]
    _programs().row_maxima[(rows,)](*_three(dense, 1), out, block=BLOCK)


def _are_transposed(matrices: Sequence[Tensor]) -> bool:
    return all(matrix.stride(0) == 1 != matrix.stride(1) for matrix in matrices)


def _three(matrices: Sequence[Tensor], dim: int) -> list[Tensor | int]:
    """Return three matrices, how far apart their rows lie, and their sizes along `dim`: 0 for missing ones."""
    missing = AT_ONCE - len(matrices)
    strides = [matrix.stride(0) for matrix in matrices]
    sizes = [matrix.shape[dim] for matrix in matrices]
    none = [0] * missing
    return [*matrices, *[matrices[0]] * missing, *strides, *none, *sizes, *none]


def _tile(columns: int) -> dict[str, int]:
    """Return the rows and columns that a program reads at a time: few columns if there are few in all."""
    return {"tall": 64, "wide": 64} if columns > FEW_COLUMNS else {"tall": 256, "wide": 16}


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
