"""Flat tensors of two dtypes, as ZeRO-3 narrows them."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero import stage3

from harness.deepspeed.kept_in_fp32 import by_dtype


def test_flat_tensors_of_two_dtypes_are_addressed_as_one() -> None:
    tensors = [
        torch.arange(start, start + 3, dtype=dtype) for start, dtype in ((0, torch.bfloat16), (3, torch.float32))
    ]
    flat: Any = by_dtype(stage3.defragment)([*tensors, torch.arange(6, 9, dtype=torch.bfloat16)])
    assert [flat.narrow(0, start, 3).tolist() for start in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert flat.narrow(0, 4, 2).dtype is torch.float32
    assert tensors[1].data_ptr() == flat.narrow(0, 3, 3).data_ptr()
