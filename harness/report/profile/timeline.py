"""Find out what the ranks of a pipeline wait for, and the share of a step that they lose by it: the bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

from harness.config.values.batch import bubble as idle_share
from harness.config.values.json_object import JsonObject
from harness.config.values.step_time import pipeline_seconds
from harness.report.profile.record import COMPUTING, RankProfile, Span, StepProfile

PEERS = {
    "SendActivation": ("RecvActivation", 1),
    "RecvActivation": ("SendActivation", -1),
    "SendGrad": ("RecvGrad", -1),
    "RecvGrad": ("SendGrad", 1),
}
"""Instruction that sends or receives -> its counterpart, and on which model chunk that is: the next or the previous."""

Answer: TypeAlias = tuple[RankProfile, Span]
"""The other side of a message: the rank, and its instruction."""
MICRO = 1e6  # the unit of time is a microsecond
TRACKS = ("instructions", "layers")
BETWEEN_STEPS_S = 0.01


@dataclass(frozen=True)
class Bubble:
    """The share of a pipeline's time in which a stage does not compute, mean over the ranks.

    Attributes:
        measured: the measured share of the time from the first forward to the last backward of any rank.
        balanced: predicted for equal stages without communication: (p - 1) / (m + p - 1) under 1F1B.
        unequal: predicted likewise, for stages with their measured times.
    """

    measured: float
    balanced: float
    unequal: float


def bubble(profile: StepProfile) -> Bubble | None:
    """Return the bubble of a step; None without pipeline stages."""
    computing = [[span for span in rank.instructions if span.kind in COMPUTING] for rank in profile.ranks]
    if profile.pp_size < 2 or not all(computing):
        return None
    whole = max(spans[-1].end for spans in computing) - min(spans[0].start for spans in computing)
    busy = [sum(span.seconds for span in spans) for spans in computing]
    m, p = profile.micro_batches, profile.pp_size
    order = profile.schedule, profile.chunks_per_stage
    stages = [
        fmean(seconds for rank, seconds in zip(profile.ranks, busy, strict=True) if rank.stage == stage) / m
        for stage in range(p)
    ]
    return Bubble(
        measured=1 - fmean(busy) / whole,
        balanced=idle_share(p, m, *order),
        # the mean stage computes m times its seconds; the rest of the predicted step it waits
        unequal=1 - m * fmean(stages) / pipeline_seconds(stages, m, *order),
    )


def with_answers(profile: StepProfile) -> Iterator[tuple[RankProfile, list[tuple[Span, Answer | None]]]]:
    """Yield each rank with its instructions; a send or receive comes with the instruction on its other side.

    The n-th send of a chunk belongs to the n-th receive of its neighbour: messages between two chunks keep their order.
    """
    sides: dict[tuple[int, int, int, str], list[Answer]] = {}
    for rank in profile.ranks:
        for span in rank.instructions:
            if span.name in PEERS:
                sides.setdefault((rank.dp_rank, rank.tp_rank, _chunk(rank, span), span.name), []).append((rank, span))
    for rank in profile.ranks:
        seen: Counter[tuple[int, str]] = Counter()
        found = []
        for span in rank.instructions:
            answer, direction = PEERS.get(span.name, ("", 0))
            chunk = _chunk(rank, span)
            there = sides.get((rank.dp_rank, rank.tp_rank, chunk + direction, answer), [])
            number = seen[chunk, span.name]
            seen[chunk, span.name] += 1
            found.append((span, there[number] if number < len(there) else None))
        yield rank, found


def _chunk(rank: RankProfile, span: Span) -> int:
    return rank.stage if span.chunk is None else span.chunk


def with_waits(profile: StepProfile) -> Iterator[tuple[RankProfile, list[Span]]]:
    """Yield each rank with its instructions; the time of a message until the other side begins is a `wait` of its own.

    Sends wait only in DeepSpeed's own schedule; in those of the harness they return at once.
    """
    for rank, spans in with_answers(profile):
        found = []
        for span, other in spans:
            may_wait = span.kind == "receive" or span.chunk is None
            found += _split(span, other[1].start) if other is not None and may_wait else [span]
        yield rank, found


def _split(span: Span, ready: float) -> list[Span]:
    """Split a message into its wait until the other side is ready, and its transfer."""
    if ready <= span.start:
        return [span]
    middle = min(ready, span.end)
    parts = [replace(span, kind="wait", end=middle), replace(span, start=middle)]
    return [part for part in parts if part.seconds > 0]


def with_gaps(spans: Sequence[Span], start: float, end: float) -> Iterator[Span]:
    """Yield the spans of a rank and, as kind `other`, the gaps between them: Python, checks, data."""
    for span in spans:
        if span.start > start:
            yield Span(kind="other", name="between instructions", start=start, end=span.start)
        yield span
        start = max(start, span.end)
    if end > start:
        yield Span(kind="other", name="after the last instruction", start=start, end=end)


# Profiled steps as Chrome's trace events, which ui.perfetto.dev and chrome://tracing show.
#
# Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, section "JSON Object Format".


def trace(profiles: Sequence[StepProfile]) -> JsonObject:
    """Return the steps one after the other as trace events: a process is a rank, arrows join sends and receives."""
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
    where = {"step": profile.step, "chunk": span.chunk, "micro_batch": span.micro_batch, "layer": span.layer}
    name = f"waits for {PEERS[span.name][0]}" if span.kind == "wait" else span.name
    return {
        "ph": "X",
        "name": f"{name}, chunk {span.chunk}" if span.chunk is not None and profile.chunks_per_stage > 1 else name,
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
            # viewers attach an arrow to the slice that encloses its time, so it ends shortly before the slice does
            yield {**arrow, "ph": "s", "pid": rank.rank, "ts": _within(span, begin)}
            yield {**arrow, "ph": "f", "bp": "e", "pid": peer.rank, "ts": _within(received, begin)}


def _within(span: Span, begin: float) -> float:
    """Return a time shortly before the end of a span."""
    return round((begin + span.end - span.seconds * 0.01) * MICRO, 3)
