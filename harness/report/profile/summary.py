"""Summarise the profiled steps by layer and by stage: `profile/summary.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median

from harness.config.values.json_object import JsonObject
from harness.report.profile.record import COMPUTING, KINDS, RankProfile, Span, StepProfile
from harness.report.profile.timeline import bubble, with_gaps, with_waits


def summary(profiles: Sequence[StepProfile]) -> JsonObject:
    """Return medians over steps that were profiled in one layout; keys say which times are per micro-batch."""
    last = profiles[-1]
    bubbles = [found for found in map(bubble, profiles) if found is not None]
    shares = [asdict(found) for found in bubbles]
    return {
        "run_id": last.run_id,
        "steps": [profile.step for profile in profiles],
        "device": last.device,
        "layout": last.layout,
        "schedule": last.schedule,
        "micro_batches": last.micro_batches,
        "step_seconds": median(profile.seconds for profile in profiles),
        "seconds_by_kind": seconds_by_kind(profiles),
        "bubble": {name: median(share[name] for share in shares) for name in shares[0]} if shares else None,
        "stages": [_stage(profiles, stage) for stage in range(last.pp_size)],
        "layers": [_layer(profiles, index) for index in range(len(last.layer_names))],
    }


def seconds_by_kind(profiles: Sequence[StepProfile]) -> dict[str, float]:
    """Return the seconds that a rank spends on each kind of work in a step, mean over ranks and steps."""
    totals = []
    for profile in profiles:
        for rank, spans in with_waits(profile):
            whole = list(with_gaps(spans, rank.start, rank.end))
            totals.append([sum(span.seconds for span in whole if span.kind == kind) for kind in KINDS])
    means = {kind: fmean(column) for kind, column in zip(KINDS, zip(*totals, strict=True), strict=True)}
    return {kind: seconds for kind, seconds in means.items() if seconds}


def largest_of_stage(profile: StepProfile, stage: int) -> RankProfile:
    """Return the rank of a stage with the highest peak memory."""
    return max(_of_stage(profile, stage), key=lambda rank: rank.memory_bytes.get("peak", 0))


def chunk_of_layer(profile: StepProfile, index: int) -> int:
    """Return the model chunk that has a layer."""
    return sum(start <= index for start in profile.stage_boundaries[1:])


def _of_stage(profile: StepProfile, stage: int) -> list[RankProfile]:
    return [rank for rank in profile.ranks if rank.stage == stage]


def _stage(profiles: Sequence[StepProfile], stage: int) -> JsonObject:
    last = profiles[-1]
    passes = [rank.instructions for profile in profiles for rank in _of_stage(profile, stage)]
    chunks = [_chunk(last, chunk, passes) for chunk in last.chunks.of_stage(stage)]
    return {
        "stage": stage,
        "ranks": [rank.rank for rank in _of_stage(last, stage)],
        **({"layers": chunks[0]["layers"]} if len(chunks) == 1 else {"chunks": chunks}),
        **{f"{kind}_seconds_per_micro_batch": _median(passes, kind) for kind in COMPUTING},
        "memory_bytes": largest_of_stage(last, stage).memory_bytes,
    }


def _chunk(profile: StepProfile, chunk: int, passes: Iterable[Sequence[Span]]) -> JsonObject:
    own = [[span for span in spans if span.chunk == chunk] for spans in passes]
    return {
        "chunk": chunk,
        "layers": [profile.stage_boundaries[chunk], profile.stage_boundaries[chunk + 1] - 1],
        **{f"{kind}_seconds_per_micro_batch": _median(own, kind) for kind in COMPUTING},
    }


def _layer(profiles: Sequence[StepProfile], index: int) -> JsonObject:
    last = profiles[-1]
    passes = [[span for span in rank.layers if span.layer == index] for p in profiles for rank in p.ranks]
    return {
        "layer": index,
        "name": last.layer_names[index],
        "stage": last.chunks.stage_of(chunk_of_layer(last, index)),
        **{f"{kind}_seconds_per_micro_batch": _median(passes, kind) for kind in ("forward", "recompute", "backward")},
    }


def _median(passes: Iterable[Sequence[Span]], kind: str) -> float | None:
    """Return the median seconds per micro-batch of a kind; each item of `passes` is one rank's spans in one step.

    An interrupted pass has several spans, so those of one micro-batch are added up.
    """
    seconds: list[float] = []
    for spans in passes:
        of_micro_batch: dict[int | None, float] = {}
        for span in spans:
            if span.kind == kind:
                of_micro_batch[span.micro_batch] = of_micro_batch.get(span.micro_batch, 0.0) + span.seconds
        seconds += of_micro_batch.values()
    return median(seconds) if seconds else None
