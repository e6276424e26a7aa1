"""Memory that was freed, given back to the system.

glibc keeps freed blocks of up to 32 MB for itself. Where large tensors are made and freed one after the other, with
small ones kept in between (a layer is filled, a part of it is kept), a process would grow to a multiple of what it
holds.
"""

from __future__ import annotations

import ctypes


def malloc_trim() -> None:
    """Return all pages that hold nothing; does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
