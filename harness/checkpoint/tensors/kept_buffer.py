"""Memory of the host into which tensors are copied at a save, so that training may change them while they are written.

It is allocated at the first save and kept: fresh memory costs several times what a copy costs. On a CPU the thread that
writes copies one half of the tensors while this one copies the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

ALIGNMENT = 64


class KeptBuffer:
    """One buffer for the copies of all tensors; pinned where they come from an accelerator."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor], helper: Executor) -> list[Tensor]:
        """Return copies in the shapes and dtypes of `tensors`; they last until the next call. `helper` is idle."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        starts = itertools.accumulate(sizes, initial=0)
        copies = [
            self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(starts, tensors, strict=False)
        ]
        if on_device:
            _fill(copies, tensors)
            get_accelerator().synchronize()
        else:
            other_half = helper.submit(_fill, copies[1::2], tensors[1::2])
            _fill(copies[::2], tensors[::2])
            other_half.result()
        return copies


@torch.no_grad()
def _fill(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
