"""How long this rank computes in a step of the pipeline, by the parts of the model: without waits for others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from harness.resilience.process.moments import Moment, moment, seconds_between

COMPUTING = ("ForwardPass", "BackwardPass", "InputGradients", "WeightGradients")


@dataclass
class StageClock:
    """Takes the time of the instructions of a pipeline that compute.

    On an accelerator, which runs behind the program, its own events take the time.
    """

    device: torch.device
    _spans: list[tuple[int, Moment, Moment]] = field(default_factory=list)
    _open: tuple[int, Moment] | None = None

    def begin(self, instruction: str, part: int) -> None:
        """Note that an instruction begins in a part of the model, and that the one before has ended."""
        if self._open is not None:
            self._spans.append((*self._open, moment(self.device)))
        self._open = (part, moment(self.device)) if instruction in COMPUTING else None

    def take(self) -> dict[int, float]:
        """Return the seconds of computing since the last call, by part; waits for the device."""
        spans, self._spans = self._spans, []
        found: dict[int, float] = {}
        for part, start, stop in spans:
            found[part] = found.get(part, 0.0) + seconds_between(start, stop)
        return found
