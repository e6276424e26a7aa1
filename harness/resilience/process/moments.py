"""Moments of a device: a CPU has the program's own clock, an accelerator, which runs behind the program, its events."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.Event


def moment(device: torch.device) -> Moment:
    """Return the moment that the device has reached, or will reach, when it has done what it was given."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, stop: Moment) -> float:
    """Return the seconds from one moment of a device to another; waits for the device to reach the second."""
    if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start
