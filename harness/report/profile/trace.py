"""Profiled steps as Chrome's trace events, which ui.perfetto.dev and chrome://tracing show.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, section "JSON Object Format".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.config.values.json_object import JsonObject
from harness.report.profile.record import RankProfile, Span, StepProfile
from harness.report.profile.timeline import PEERS, with_answers, with_waits

MICRO = 1e6  # the unit of time is a microsecond
TRACKS = ("instructions", "layers")
BETWEEN_STEPS_S = 0.01


def trace(profiles: Sequence[StepProfile]) -> JsonObject:
    """Return the steps one after the other; a process is a rank, and arrows join each send with its receive."""
    events = [event for rank in profiles[-1].ranks for event in _names(rank)]
    begin = 0.0
    for profile in profiles:
        for rank, spans in with_waits(profile):
            whole = Span(kind="step", name=f"step {profile.step}", start=rank.start, end=rank.end)
            events += [_slice(rank, span, begin, 0, profile) for span in (whole, *spans)]
            events += [_slice(rank, span, begin, 1, profile) for span in rank.layers]
        events += _arrows(profile, begin)
        begin += profile.seconds + BETWEEN_STEPS_S
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(rank: RankProfile) -> Iterator[JsonObject]:
    def named(what: str, thread: int, name: str) -> JsonObject:
        return {"ph": "M", "name": what, "pid": rank.rank, "tid": thread, "args": {"name": name}}

    yield named("process_name", 0, f"rank {rank.rank}, stage {rank.stage}, {rank.host}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "tid": 0, "args": {"sort_index": rank.rank}}
    for thread, name in enumerate(TRACKS):
        yield named("thread_name", thread, name)


def _slice(rank: RankProfile, span: Span, begin: float, thread: int, profile: StepProfile) -> JsonObject:
    where = {"step": profile.step, "part": span.part, "micro_batch": span.micro_batch, "layer": span.layer}
    name = f"waits for {PEERS[span.name][0]}" if span.kind == "wait" else span.name
    return {
        "ph": "X",
        "name": f"{name}, part {span.part}" if span.part is not None and profile.parts_per_stage > 1 else name,
        "cat": span.kind,
        "pid": rank.rank,
        "tid": thread,
        "ts": round((begin + span.start) * MICRO, 3),
        "dur": round(span.seconds * MICRO, 3),
        "args": {name: value for name, value in where.items() if value is not None},
    }


def _arrows(profile: StepProfile, begin: float) -> Iterator[JsonObject]:
    """Yield an arrow from the end of each send to the end of its receive."""
    for rank, spans in with_answers(profile):
        sent = [(span, other) for span, other in spans if other is not None and span.kind == "send"]
        for number, (span, (peer, received)) in enumerate(sent):
            name = span.name
            arrow = {"name": name, "cat": "message", "id": f"{profile.step}-{rank.rank}-{name}-{number}", "tid": 0}
            # an arrow binds to the slice that encloses its time
            yield {**arrow, "ph": "s", "pid": rank.rank, "ts": _within(span, begin)}
            yield {**arrow, "ph": "f", "bp": "e", "pid": peer.rank, "ts": _within(received, begin)}


def _within(span: Span, begin: float) -> float:
    """Return a time shortly before the end of a span."""
    return round((begin + span.end - span.seconds * 0.01) * MICRO, 3)
