"""How long this rank computes in a step of the pipeline: forward and backward passes, without waits for others."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

COMPUTING = ("ForwardPass", "BackwardPass", "InputGradients", "WeightGradients")


@dataclass
class StageClock:
    """Takes the time of the instructions of a pipeline that compute.

    On an accelerator, which runs behind the program, its own events take the time.
    """

    device: torch.device
    _spans: list[tuple[Any, Any]] = field(default_factory=list)
    _start: Any = None

    def begin(self, instruction: str) -> None:
        """Note that an instruction begins, and that the one before has ended."""
        if self._start is not None:
            self._spans.append((self._start, self._now()))
        self._start = self._now() if instruction.startswith(COMPUTING) else None

    def take(self) -> float:
        """Return the seconds of computing since the last call; waits for the device."""
        spans, self._spans = self._spans, []
        if self.device.type == "cpu":
            return float(sum(stop - start for start, stop in spans))
        if spans:
            spans[-1][1].synchronize()
        return float(sum(start.elapsed_time(stop) for start, stop in spans)) / 1000

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event
