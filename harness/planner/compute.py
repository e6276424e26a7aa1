"""Seconds of a decoder layer on one device: matrix products, attention, and what only moves memory.

A roofline (Williams et al. 2009): a kernel takes the longer of its operations at the rate that its shape reaches
and its bytes at the memory's rate. The rate of a matrix product falls where its tiles do not fill the processors of the
device in whole waves, and where the inner dimension is short (NVIDIA, Matrix Multiplication Background: tile and wave
quantization).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from harness.planner.hardware import Hardware

# Rows and columns of a tile, and its rate next to the largest one's: a small tile reads its inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
START_UP = 64  # inner dimension at which the start and the end of a tile cost as much as its products: two of its steps
# Rows must begin at multiples of 16 bytes for the fast kernels: an odd size is left to slow ones (same source, on
# alignment; CUTLASS reaches about a third without vector loads).
ALIGNED, UNALIGNED_RATE = 8, 0.3
PRODUCT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch: forward, and backward without any recomputation."""

    forward: float
    backward: float

    def plus(self, other: Seconds) -> Seconds:
        """Return the sum of both."""
        return Seconds(self.forward + other.forward, self.backward + other.backward)


@lru_cache(maxsize=65536)
def matmul(
    hardware: Hardware, precision: str, rows: int, inner: int, columns: int, copies: int = 1, kernels: int = 1
) -> float:
    """Return the seconds of `copies` products of rows x inner by inner x columns in so many kernels."""
    rate = hardware.reached_flops(precision) * inner / (inner + START_UP)
    if hardware.compute_units > 1 and (inner % ALIGNED or columns % ALIGNED):
        rate *= UNALIGNED_RATE
    work = 2.0 * copies * rows * inner * columns
    best = min(
        ceil(copies * ceil(rows / tall) * ceil(columns / wide) / hardware.compute_units)
        * hardware.compute_units * tall * wide / speed
        for tall, wide, speed in TILES
    ) / (copies * rows * columns)  # fmt: skip
    moved = copies * (PRODUCT_BYTES[precision] * inner * (rows + columns) + 2.0 * rows * columns)
    return max(work * best / rate, moved / hardware.memory_bytes_per_second) + kernels * hardware.kernel_seconds


def product(
    hardware: Hardware, precision: str, rows: int, inner: int, columns: int, copies: int = 1, kernels: int = 1
) -> Seconds:
    """Return the seconds of a layer's product, and of the gradients of its input and its weight."""
    if not rows * inner * columns * copies:
        return Seconds(0.0, 0.0)
    forward = matmul(hardware, precision, rows, inner, columns, copies, kernels)
    of_input = matmul(hardware, precision, rows, columns, inner, copies, kernels)
    of_weight = matmul(hardware, precision, inner, rows, columns, copies, kernels)
    return Seconds(forward, of_input + of_weight)
