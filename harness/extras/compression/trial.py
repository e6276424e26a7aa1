"""Choose the number of bits for `"bits": "auto"` by timing the reduction of a few gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.extras.compression.quantization import BLOCK
from harness.extras.compression.reduction import Residue, compressed_mean
from harness.parallel.collectives import all_reduce_in_place

SAMPLE = 1 << 18
"""Number of elements of a trial: 1 MiB in float32. More than 2,048 ranks need more: each has at least one block."""
CLEARLY = 0.8
"""Compression must take less than this share of the time, because it costs accuracy and a measurement is noisy."""


@dataclass(frozen=True)
class Choice:
    """The number of bits chosen for all ranks (0: float32), and the seconds on the slowest rank by number of bits."""

    bits: int
    seconds: dict[int, float]
    numbers: int = SAMPLE

    def __str__(self) -> str:
        shown = ", ".join(
            f"{'float32' if bits == 0 else f'{bits} bits'} {1e3 * seconds:.1f} ms"
            for bits, seconds in self.seconds.items()
        )
        chosen = f"{self.bits} bits" if self.bits else "off"
        return f"gradient compression: {chosen} ({self.numbers * 4 / 2**20:.2g} MiB of gradients: {shown})"


def measure(group: dist.ProcessGroup | None, device: torch.device) -> Choice:
    """Time float32, 8 and 4 bits among data-parallel ranks; all ranks of the world must call it, and choose alike."""
    times = torch.tensor([_seconds(bits, group, device) for bits in (0, 8, 4)], dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    seconds = dict(zip((0, 8, 4), times.tolist(), strict=True))
    return Choice(choose(seconds), seconds, trial_size(1 if group is None else dist.get_world_size(group)))


def choose(seconds: dict[int, float]) -> int:
    """Return the best number of bits (0: float32), given the seconds that each takes."""
    bits = 0
    for fewer in (8, 4):
        if seconds[fewer] < CLEARLY * seconds[bits]:
            bits = fewer
    return bits


def trial_size(ranks: int) -> int:
    """Return the number of elements of a trial: about SAMPLE, and at least one whole block for each rank."""
    return max(1, SAMPLE // (BLOCK * ranks)) * BLOCK * ranks


def _seconds(bits: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    if group is None:
        return 0.0
    ranks = dist.get_world_size(group)
    values = torch.ones(trial_size(ranks), device=device)
    residue = Residue.none(len(values), ranks, device)

    def once() -> Tensor:
        if bits:
            return compressed_mean(values, residue, bits, group)
        all_reduce_in_place(values, group)
        return values

    return min(_timed(once) for _ in range(3))


def _timed(work: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    work().flatten()[0].item()  # waits for the device
    return time.perf_counter() - start
