"""What the next device, and the next GiB on each of them, would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.planner.estimate import Estimate
from harness.planner.hardware import GIB, HEADROOM
from harness.planner.search import Found, search
from harness.planner.task import Task


@dataclass(frozen=True, kw_only=True)
class MoreDevices:
    """The best layout of the next larger number of devices that gains from them."""

    devices: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class MoreMemory:
    """The least memory on each device with which a faster layout fits."""

    gib: float
    tokens_per_second: float


def more_devices(task: Task, best: Estimate) -> MoreDevices | None:
    """Return what the next usable number of devices brings: one or two more, a node more, or twice as many.

    None where none of them is faster: the global batch does not divide.
    """
    now, size = task.world_size, task.hardware.node_size
    few = {now + 1, now + 2, (now // size + 1) * size} if now < 8 * size else set()
    for world_size in sorted(few | {2 * now}):
        fitting = search(replace(task, world_size=world_size)).fitting
        if fitting and fitting[0].tokens_per_second > best.tokens_per_second:
            return MoreDevices(devices=world_size, tokens_per_second=fitting[0].tokens_per_second)
    return None


def more_memory(found: Found) -> MoreMemory | None:
    """Return the least memory that lets a faster layout fit; None where memory holds nothing back."""
    best = found.fitting[0]
    faster = [one for one in found.too_large if one.tokens_per_second > best.tokens_per_second]
    nearest = min(faster, key=lambda one: one.peak_bytes, default=None)
    if nearest is None or nearest.peak_bytes <= nearest.hardware.planned_bytes:
        return None
    missing = (nearest.peak_bytes / (1 - HEADROOM) - nearest.hardware.limit_bytes) / GIB
    return MoreMemory(gib=missing, tokens_per_second=nearest.tokens_per_second)
