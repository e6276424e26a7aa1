"""Put the events of a tape in time, and write them as a trace that chrome://tracing and Perfetto open.

An event starts when its stream is free, what it waits for has ended, and the host has come to it. The host takes a
moment for each event, and jumps to the end of what it waits for. Where the device computes nothing, the timeline says
what for, so the spans of the stream `compute` follow each other without a gap, and their sum is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from harness.config.values.json_object import JsonObject
from harness.dry_run.tape import COMPUTE, Event
from harness.planner.layer_time import COLLECTIVE_OPERATIONS

PASSES = "passes"
BETWEEN_STAGES = ("pipeline", "model", "world")
"""Groups of ranks of several stages."""
COLORS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "communication": "thread_state_iowait",
    "optimizer": "thread_state_unknown",
    "wait": "grey",
}
"""Chrome's names of the colours."""


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """What a stream does from `start` to `end`, in seconds from the beginning of the step.

    Attributes:
        part: forward, backward, optimizer, communication, or wait.
        micro_batch: None for what is done once a step.
    """

    name: str
    stream: str
    part: str
    start: float
    end: float
    micro_batch: int | None = None


class StepClock:
    """Gives events their time, one after the other in the order in which the host issues them.

    Attributes:
        spans: what has been put in time so far.
        host: when the host has issued all so far, in seconds.
    """

    def __init__(self, dispatch_seconds: float) -> None:
        self.spans: list[TimelineSpan] = []
        self.host = 0.0
        self._dispatch = dispatch_seconds
        self._free: dict[str, float] = {COMPUTE: 0.0}  # when each stream is
        self._messages: dict[int, tuple[float, str]] = {}  # by number: when the latest one ended, and its name

    @property
    def computed(self) -> float:
        """When the device has computed all so far."""
        return self._free[COMPUTE]

    def run(self, events: Iterable[Event], micro_batch: int | None = None, *, arrival: float = 0.0) -> None:
        """Run the events of an instruction.

        Args:
            arrival: when what they receive from another stage is there, or the other stages join a collective.
        """
        for event in events:
            for number in event.waits:
                self._wait(*self._messages.get(number, (0.0, "")))
            if event.is_host_wait:
                self.host = max(self.host, self.computed)
            elif event.stream == COMPUTE:
                self._compute(event, micro_batch)
            else:
                self._send(event, micro_batch, arrival)

    def finish(self) -> float:
        """Wait for all messages and for the host; return the end of the step."""
        for end, name in sorted(self._messages.values()):
            self._wait(end, name)
        return self.meet()

    def meet(self) -> float:
        """Let device and host wait for each other, but for no message; return when both are there."""
        self._wait(self.host, "the host")
        self.host = self.computed
        return self.computed

    def _compute(self, event: Event, micro_batch: int | None) -> None:
        self._wait(self.host, "the host")
        self._add(event.name, COMPUTE, event.part, self.computed, self.computed + event.seconds, micro_batch)
        self.host += self._dispatch

    def _send(self, event: Event, micro_batch: int | None, arrival: float) -> None:
        self.host += COLLECTIVE_OPERATIONS * self._dispatch
        start = max(self._free.get(event.stream, 0.0), self.computed, self.host)
        if event.stream in BETWEEN_STAGES and event.name != "send":
            start = max(start, arrival - event.seconds if event.name == "recv" else arrival)
        end = start + event.seconds
        self._add(event.name, event.stream, event.part, start, end, micro_batch)
        self._messages[event.number] = end, f"{event.name} ({event.stream})"
        if event.blocks:
            self._wait(*self._messages[event.number])

    def _wait(self, until: float, cause: str) -> None:
        if until > self.computed:
            self._add(f"wait for {cause}", COMPUTE, "wait", self.computed, until)

    def _add(self, name: str, stream: str, part: str, start: float, end: float, micro_batch: int | None = None) -> None:
        self.spans.append(
            TimelineSpan(name=name, stream=stream, part=part, start=start, end=end, micro_batch=micro_batch)
        )
        self._free[stream] = end


def between(spans: Sequence[TimelineSpan], start: float, end: float) -> list[TimelineSpan]:
    """Return what lies between two times, cut there; the first becomes the beginning."""
    return [
        replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in spans
        if span.end > start and span.start < end
    ]


def seconds_by_cause(spans: Iterable[TimelineSpan]) -> dict[str, float]:
    """Return the seconds of a step that a device computes, by part, and that it waits, by what for, as `the host`.

    Their sum is the step. Waits for messages are the communication that no computation hides.
    """
    found: dict[str, float] = {}
    for span in spans:
        if span.stream == COMPUTE:
            cause = span.name if span.part == "wait" else span.part
            found[cause] = found.get(cause, 0.0) + span.end - span.start
    return found


def passes(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Return the passes of a step: neighbouring kernels of one part and micro-batch as one span, without the waits."""
    kernels = [span for span in spans if span.stream == COMPUTE and span.part != "wait"]
    key: Callable[[TimelineSpan], tuple[str, int | None]] = lambda span: (span.part, span.micro_batch)  # noqa: E731
    found = []
    for (part, micro_batch), group in groupby(kernels, key):
        of_pass = list(group)
        name = part if micro_batch is None or part == "optimizer" else f"{part} {micro_batch}"
        start = of_pass[0].start
        end = of_pass[-1].end
        found.append(TimelineSpan(name=name, stream=PASSES, part=part, start=start, end=end, micro_batch=micro_batch))
    return found


def as_trace(of_ranks: Mapping[int, Sequence[TimelineSpan]]) -> JsonObject:
    """Return the spans of some ranks in Chrome's trace event format; times are in microseconds.

    Each rank is a process, and each stream a thread of it.
    """
    events: list[JsonObject] = []
    for rank, spans in of_ranks.items():
        of_passes = passes(spans)
        streams = list(dict.fromkeys([PASSES, COMPUTE, *(span.stream for span in spans)]))
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events += [_name("thread_name", rank, thread, stream) for thread, stream in enumerate(streams)]
        events += [_complete(span, rank, streams.index(span.stream)) for span in (*of_passes, *spans)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(span: TimelineSpan, rank: int, thread: int) -> JsonObject:
    # in whole nanoseconds, and from one time to the next: if durations were rounded by themselves, spans would overlap
    start = round(span.start * 1e9)
    end = round(span.end * 1e9)
    return {
        "name": span.name,
        "cat": span.part,
        "ph": "X",
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "pid": rank,
        "tid": thread,
        "cname": COLORS[span.part],
        "args": {} if span.micro_batch is None else {"micro_batch": span.micro_batch},
    }


def _name(kind: str, rank: int, thread: int, name: str) -> JsonObject:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
