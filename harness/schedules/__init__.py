"""Pipeline schedules: one module each, with everything specific in its `PipelineSchedule`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from harness.records import records
from harness.schedules.chunks import ModelChunks
from harness.schedules.schedule import Kind, Order, Pass, PipelineSchedule

__all__ = [
    "DEFAULT",
    "INTERLEAVED",
    "SCHEDULES",
    "Kind",
    "ModelChunks",
    "Order",
    "Pass",
    "PipelineSchedule",
    "model_chunks",
    "named",
]

_DEFAULT_CHUNKS = 2  # per stage, for a schedule that leaves their number open
_FOUND = records(__name__, __path__, PipelineSchedule, attrgetter("name"))
SCHEDULES: Mapping[str, PipelineSchedule] = {
    each.name: each for each in sorted(_FOUND.values(), key=lambda each: (each.chunks != 1, each.paper))
}
"""All schedules by name: schedules with one model chunk per stage first, then by the date of the paper."""
DEFAULT = SCHEDULES["1f1b"].name
"""DeepSpeed's own schedule."""
INTERLEAVED = SCHEDULES["interleaved"].name
"""The schedule for any number of model chunks per stage."""


def named(name: str) -> PipelineSchedule:
    """Return a schedule by name; DeepSpeed's own for an unknown name."""
    return SCHEDULES.get(name, SCHEDULES[DEFAULT])


def model_chunks(num_stages: int, schedule: str, chunks_per_stage: int | None = None) -> ModelChunks:
    """Return the model chunks of a schedule.

    Args:
        chunks_per_stage: chunks per stage (`pipeline.chunks_per_stage`), for a schedule that leaves their number open.
    """
    # A single stage never waits, so nothing is gained by cutting it into chunks.
    if num_stages == 1:
        return ModelChunks(1)
    found = named(schedule)
    per_stage = (chunks_per_stage or _DEFAULT_CHUNKS) if found.chunks is None else found.chunks
    return ModelChunks(num_stages, per_stage, found.folded)
