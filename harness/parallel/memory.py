"""Give freed CPU memory back to the system while a model is built, and keep it while it is trained.

glibc keeps freed blocks of up to 32 MB. If large tensors are made and freed one after the other and small ones stay in
between (a layer is filled, a part of it is kept), a process grows to a multiple of what it holds: hence `malloc_trim`.
Larger blocks go back to the system, and the kernel fills each page of the next such block with zeros. A training step
makes the same large tensors (logits) again and again, and loses time by that: hence `keep_freed_memory`.
"""

from __future__ import annotations

import ctypes

import torch

from harness.topology.env import inherited

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def malloc_trim() -> None:
    """Give all free pages back to the system; do nothing if the C library lacks this call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory(device: torch.device) -> None:
    """Have glibc keep memory that is freed from now on, up to 2 GiB at the end of the heap, for training on a CPU.

    Do nothing for another device, if the environment sets this up (`MALLOC_...`), or if the C library lacks the call.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type == "cpu" and option is not None and not inherited("MALLOC_"):
        option(M_TRIM_THRESHOLD, 2**31 - 1)
        option(M_MMAP_MAX, 0)
