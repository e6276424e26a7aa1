"""Tensors without values, where torch itself has no shape for a result."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import grouped_mm

from harness.dry_run.world import fake_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_have_a_shape_in_every_dtype(dtype: torch.dtype) -> None:
    with fake_tensors():
        rows, weights = torch.ones(8, 16, dtype=dtype), torch.ones(2, 24, 16, dtype=dtype)
        product = grouped_mm(rows, weights.transpose(1, 2), offs=torch.tensor([4, 8], dtype=torch.int32))
    assert (product.shape, product.dtype) == ((8, 24), dtype)
