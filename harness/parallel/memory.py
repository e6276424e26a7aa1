"""Return freed CPU memory to the system while a model is built, and keep it while the model is trained.

glibc keeps freed blocks of up to 32 MB. If large tensors are allocated and freed in turn while small ones stay in
between (a layer is filled, a part of it is kept), a process grows to a multiple of its live memory: hence
`malloc_trim`. Larger blocks return to the system, and the kernel zeroes each page of the next such block. A training
step allocates the same large tensors (logits) again and again, and would lose time there: hence `keep_freed_memory`.
"""

from __future__ import annotations

import ctypes

import torch

from harness.topology.env import inherited

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def malloc_trim() -> None:
    """Return all free pages to the system; do nothing if the C library lacks this call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory(device: torch.device) -> None:
    """Make glibc keep freed memory from now on, for training on a CPU.

    Does nothing on another device, if the environment configures malloc (`MALLOC_...`), or without this call in libc.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type == "cpu" and option is not None and not inherited("MALLOC_"):
        # The heap keeps up to 2 GiB at its end, and large blocks come from it too, instead of mappings of their own.
        option(M_TRIM_THRESHOLD, 2**31 - 1)
        option(M_MMAP_MAX, 0)
