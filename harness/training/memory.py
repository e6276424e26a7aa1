"""The peak memory of a run, of the rank that needs most."""

from __future__ import annotations

import resource
import sys

import torch

from harness.training.process.distributed import largest

GIB = 2**30
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in


def peak_memory_gib(device: torch.device) -> tuple[float | None, float]:
    """Return the peak memory so far on the device, None on a CPU, and of the process on the host; all ranks call it
    and get the largest of all ranks."""
    on_device = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES
    on_device, on_host = largest([on_device, on_host], device)
    return (None if device.type == "cpu" else on_device / GIB), on_host / GIB
