"""How long this rank computes in a step of the pipeline: forward and backward passes, without waits for others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from harness.training.process.moments import Moment, moment, seconds_between

COMPUTING = ("ForwardPass", "BackwardPass", "InputGradients", "WeightGradients")


@dataclass
class StageClock:
    """Takes the time of the instructions of a pipeline that compute.

    On an accelerator, which runs behind the program, its own events take the time.
    """

    device: torch.device
    _spans: list[tuple[Moment, Moment]] = field(default_factory=list)
    _start: Moment | None = None

    def begin(self, instruction: str) -> None:
        """Note that an instruction begins, and that the one before has ended."""
        if self._start is not None:
            self._spans.append((self._start, moment(self.device)))
        self._start = moment(self.device) if instruction.startswith(COMPUTING) else None

    def take(self) -> float:
        """Return the seconds of computing since the last call; waits for the device."""
        spans, self._spans = self._spans, []
        return sum((seconds_between(start, stop) for start, stop in spans), 0.0)
