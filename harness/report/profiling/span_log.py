"""Notes what begins and ends in a step; on an accelerator, which runs behind the program, its own events say when."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from harness.report.profile.record import Span
from harness.resilience.process.moments import Moment, moment, seconds_between

OF_MICRO_BATCHES = ("forward", "recompute", "backward", "send", "receive", "data")


@dataclass
class Clock:
    """The time of a device, as this process's `time.perf_counter` shows it. Nothing waits for the device in a step."""

    device: torch.device
    _base: tuple[float, Moment] = (0.0, 0.0)

    def start(self) -> None:
        """Begin a step; waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._base = time.perf_counter(), self.now()

    def now(self) -> Moment:
        """Return this moment, for `seconds`."""
        return moment(self.device)

    def seconds(self, at: Moment) -> float:
        """Return a moment of the step in seconds; waits for the device to reach it."""
        begun, base = self._base
        return at if isinstance(at, float) else begun + seconds_between(base, at)


@dataclass(slots=True)
class _Doing:
    """What goes on since `start`; `number`: its micro-batch, or how many of its kind and layer have begun before it."""

    kind: str
    name: str
    layer: int | None
    part: int | None
    number: int
    start: Moment


@dataclass
class SpanLog:
    """What happens one after the other: an inner thing interrupts the outer one."""

    clock: Clock
    inner: SpanLog | None = None  # of what happens within; all of it ends where something begins or ends here
    _noted: list[tuple[_Doing, Moment]] = field(default_factory=list)
    _open: list[_Doing] = field(default_factory=list)
    _counts: Counter[tuple[str, int | None]] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """Of what goes on now; empty if nothing does."""
        return self._open[-1].kind if self._open else ""

    def begin(
        self,
        kind: str,
        name: str,
        layer: int | None = None,
        *,
        part: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        """Note that something begins, within what has begun before and has not ended.

        Where the micro-batch is not said, they are taken to come one after the other.
        """
        self._end_inner()
        now, thing = self.clock.now(), (name, layer) if layer is None else (kind, layer)
        if self._open:
            self._noted.append((self._open[-1], now))
        number = self._counts[thing] if micro_batch is None else micro_batch
        self._open.append(_Doing(kind, name, layer, part, number, now))
        self._counts[thing] += 1

    def end(self) -> None:
        """Note that what began last ends, and what it interrupted goes on."""
        self._end_inner()
        if self._open:
            now = self.clock.now()
            self._noted.append((self._open.pop(), now))
            if self._open:
                self._open[-1] = replace(self._open[-1], start=now)

    def end_all(self) -> None:
        """Note that nothing goes on."""
        while self._open:
            self.end()

    def _end_inner(self) -> None:
        if self.inner is not None:
            self.inner.end_all()

    def spans(self, origin: float) -> list[Span]:
        """Return what was noted, in seconds since `origin`; what took no time is left out."""
        return [
            Span(
                kind=doing.kind,
                name=doing.name,
                start=self.clock.seconds(doing.start) - origin,
                end=self.clock.seconds(end) - origin,
                micro_batch=doing.number if doing.kind in OF_MICRO_BATCHES else None,
                layer=doing.layer,
                part=doing.part,
            )
            for doing, end in self._noted
            if self.clock.seconds(end) > self.clock.seconds(doing.start)
        ]
