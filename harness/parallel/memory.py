"""Memory that was freed on the CPU: given back to the system while a model is built, kept while it is trained.

glibc keeps freed blocks of up to 32 MB for itself. Where large tensors are made and freed one after the other, with
small ones kept in between (a layer is filled, a part of it is kept), a process would grow to a multiple of what it
holds. Larger blocks go back to the system, and the kernel fills each page of the next one with zeros when it is first
touched. Every step of training makes the same large tensors again, as logits.
"""

from __future__ import annotations

import ctypes

import torch

from harness.topology.env import inherited

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def malloc_trim() -> None:
    """Return all pages that hold nothing; does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory(device: torch.device) -> None:
    """Have glibc keep what is freed from now on, up to 2 GiB at the end of its memory, for training on a CPU.

    Leaves it alone for another device, and where the environment sets it up (`MALLOC_...`) or the C library has no
    such call.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type == "cpu" and option is not None and not inherited("MALLOC_"):
        option(M_TRIM_THRESHOLD, 2**31 - 1)
        option(M_MMAP_MAX, 0)
