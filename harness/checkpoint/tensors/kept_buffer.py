"""Memory of the host into which tensors are copied at a save, so that training may change them while they are written.

It is allocated at the first save and kept: fresh memory costs several times what a copy costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

ALIGNMENT = 64


class KeptBuffer:
    """One buffer for the copies of all tensors; pinned where they come from an accelerator."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies in the shapes and dtypes of `tensors`; they last until the next call."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        copies, at = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copy = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=on_device))
            at += size
        if on_device:
            get_accelerator().synchronize()
        return copies
