"""A clock for the simulated device: a step takes a number of seconds, without noise and however busy the machine is.

A kernel takes the seconds that the planner's device needs for its bytes and FLOPs (harness/dry_run/kernel_time.py), a
collective those of the link (harness/planner/traffic.py). A kernel starts when its stream is free, what the stream has
waited for has ended, and the host has come to it; a collective, when the last of its members is there. The host takes
`dispatch_seconds` for each, and jumps to the end of what it waits for.

Collectives of two groups do not share a link here, and cost the kernels beside them nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from harness.dry_run.kernel_time import Kernel, Kernels
from harness.planner.hardware import Hardware
from harness.planner.layer_time import COLLECTIVE_OPERATIONS
from harness.planner.traffic import collective
from tests.support.simulated_device import device, works


@dataclass(frozen=True)
class Span:
    """A kernel or a collective: its stream's number, and nanoseconds."""

    name: str
    stream: int
    start: int
    end: int


class Clock:
    """Notes what runs on this rank's device while it runs.

    Attributes:
        has_links: whether collectives and transfers take time; else links are infinitely fast.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware, self.has_links = hardware, True
        self.spans: list[Span] = []

    def ran(self, kernel: Kernel) -> None:
        """Let a kernel take its time in the current stream."""
        dispatch = round(self.hardware.dispatch_seconds * 1e9)
        self.spans.append(Span(kernel.name, *device.C.spend(round(kernel.seconds * 1e9), dispatch)))

    @staticmethod
    def now() -> int:
        """Return when all that has begun on this rank has ended, in nanoseconds."""
        return int(device.C.now())

    def seconds(self, operation: str, ranks: Sequence[int], size_bytes: int) -> float:
        """Return how long a collective takes that this rank begins now; see `harness.planner.traffic.collective`."""
        device.C.host_spends(round(COLLECTIVE_OPERATIONS * self.hardware.dispatch_seconds * 1e9))
        return collective(self.hardware, operation, ranks, size_bytes) if self.has_links else 0.0

    def took(self, what: str, stream: int, start: int, end: int) -> None:
        """Note a collective or a transfer that has ended; nanoseconds."""
        self.spans.append(Span(what, stream, start, end))


@contextmanager
def running(hardware: Hardware) -> Iterator[Clock]:
    """Let the clock of this rank run meanwhile; all ranks do it together."""
    works.CLOCK.append(Clock(hardware))
    try:
        with Kernels(hardware, works.CLOCK[-1].ran, device.NAME):
            yield works.CLOCK[-1]
    finally:
        works.CLOCK.pop()
