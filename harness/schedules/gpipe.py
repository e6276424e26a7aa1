"""GPipe (Huang et al. 2019, arXiv 1811.06965): all forward passes, then all backward passes."""

from __future__ import annotations

from collections.abc import Iterator

from harness.schedules.chunks import ModelChunks
from harness.schedules.one_forward_one_backward import waits
from harness.schedules.schedule import Kind, Pass, PipelineSchedule


def gpipe(_chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under GPipe."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for index in range(micro_batches):
            yield Pass(kind, index, stage)


def in_flight(_chunks: ModelChunks, micro_batches: int, _stage: int) -> float:
    """Return the number of micro-batches held: all of them."""
    return micro_batches


SCHEDULE = PipelineSchedule(name="gpipe", paper="1811.06965", order=gpipe, waits=waits, in_flight=in_flight)
