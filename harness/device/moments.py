"""Timestamps of a device: the clock on a CPU; events on an accelerator, which runs behind the program."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.Event


def moment(device: torch.device) -> Moment:
    """Return the moment at which the device finishes the work that is queued so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, stop: Moment) -> float:
    """Return the seconds between two moments of a device. Host sync: waits until the device has reached `stop`."""
    if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start
