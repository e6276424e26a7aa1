"""What a rank waits for in a pipeline, and how much of a step is lost to it: the bubble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from harness.config.values.batch import bubble as idle_share
from harness.config.values.batch import left_waits
from harness.config.values.layout_keys import DEEPSPEED_1F1B
from harness.profile.record import COMPUTING, RankProfile, Span, StepProfile

PEERS = {
    "SendActivation": ("RecvActivation", 1),
    "RecvActivation": ("SendActivation", -1),
    "SendGrad": ("RecvGrad", -1),
    "RecvGrad": ("SendGrad", 1),
}
"""By an instruction that talks to a neighbouring stage: the one that answers it there, and the direction."""


@dataclass(frozen=True)
class Bubble:
    """The share of a pipeline's time in which a stage does not compute, mean over the ranks.

    Attributes:
        measured: of the time from the first forward to the last backward of any rank.
        balanced: of equal stages, without communication: (p - 1) / (m + p - 1) under 1F1B.
        unequal: the same for stages that take as long as they were measured to take.
    """

    measured: float
    balanced: float
    unequal: float


def pipeline_seconds(stages: Sequence[float], micro_batches: int, schedule: str = DEEPSPEED_1F1B) -> float:
    """Return the seconds of a step: each stage once, and the slowest for every other micro-batch.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    section 2.2.1, for stages of unequal time. Other schedules leave a share of these waits.
    """
    waits = (sum(stages) - max(stages)) * left_waits(len(stages), micro_batches, schedule)
    return micro_batches * max(stages) + waits


def bubble(profile: StepProfile) -> Bubble | None:
    """Return the bubble of a step; None without pipeline stages."""
    computing = [[span for span in rank.instructions if span.kind in COMPUTING] for rank in profile.ranks]
    if profile.stages < 2 or not all(computing):
        return None
    whole = max(spans[-1].end for spans in computing) - min(spans[0].start for spans in computing)
    busy = [sum(span.seconds for span in spans) for spans in computing]
    m, p = profile.micro_batches, profile.stages
    stages = [
        fmean(seconds for rank, seconds in zip(profile.ranks, busy, strict=True) if rank.stage == stage) / m
        for stage in range(p)
    ]
    return Bubble(
        measured=1 - fmean(busy) / whole,
        balanced=idle_share(p, m, profile.schedule),
        unequal=1 - m * fmean(stages) / pipeline_seconds(stages, m, profile.schedule),
    )


def with_waits(profile: StepProfile) -> Iterator[tuple[RankProfile, list[Span]]]:
    """Yield each rank with its instructions, in which `wait` is the time before the other side of a message begins."""
    by_place = {(rank.stage, rank.dp_rank, rank.tp_rank): _by_name(rank) for rank in profile.ranks}
    for rank in profile.ranks:
        spans = []
        seen: dict[str, int] = {}
        for span in rank.instructions:
            number = seen[span.name] = seen.get(span.name, -1) + 1
            answer, direction = PEERS.get(span.name, ("", 0))
            peers = by_place.get((rank.stage + direction, rank.dp_rank, rank.tp_rank), {}).get(answer, [])
            spans += _split(span, peers[number].start) if number < len(peers) else [span]
        yield rank, spans


def _by_name(rank: RankProfile) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in rank.instructions:
        found.setdefault(span.name, []).append(span)
    return found


def _split(span: Span, ready: float) -> list[Span]:
    """Return a message as its wait for the other side, which is ready at some time, and its transfer."""
    if ready <= span.start:
        return [span]
    middle = min(ready, span.end)
    parts = [replace(span, kind="wait", end=middle), replace(span, start=middle)]
    return [part for part in parts if part.seconds > 0]


def with_gaps(spans: Sequence[Span], start: float, end: float) -> Iterator[Span]:
    """Yield the spans of a rank and, as `other`, what lies between them: Python, checks, data."""
    for span in spans:
        if span.start > start:
            yield Span(kind="other", name="between instructions", start=start, end=span.start)
        yield span
        start = max(start, span.end)
    if end > start:
        yield Span(kind="other", name="after the last instruction", start=start, end=end)
