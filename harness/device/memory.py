"""Current and peak memory of this process and its device."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.topology.processes import peak_resident_bytes

GIB = 2**30


@dataclass
class EarlierPeaks:
    """The highest peaks of a run before the last `reset_peak`, in bytes."""

    device: int = 0
    host: int = 0


def reset_peak(device: torch.device, earlier: EarlierPeaks) -> None:
    """Reset the peak that `peak_bytes` returns, after recording it in `earlier`."""
    earlier.host = max(earlier.host, peak_resident_bytes())
    if device.type != "cpu":
        earlier.device = max(earlier.device, peak_bytes(device))
        torch.accelerator.reset_peak_memory_stats(device)
    # 5 resets the peak of the resident set. Elsewhere than on Linux, or if not permitted, the run's peak stays.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> int:
    """Return the peak in bytes since `reset_peak`: resident set on a CPU, allocated memory on an accelerator."""
    return peak_resident_bytes() if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def host_bytes() -> int:
    """Return the resident set of this process in bytes, or its peak if the system shows nothing else."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    return peak_resident_bytes()
