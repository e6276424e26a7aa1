"""1F1B (Narayanan et al. 2019, PipeDream, SOSP; arXiv 1806.03377).

A stage runs a few forward passes ahead, then one forward and one backward pass in turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.schedules.chunks import ModelChunks
from harness.schedules.schedule import Kind, Pass, PipelineSchedule


def one_forward_one_backward(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under 1F1B."""
    ahead = min(chunks.num_stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index, stage)
    for index in range(micro_batches):
        yield Pass(Kind.BACKWARD, index, stage)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index, stage)


def waits(chunks: ModelChunks, _micro_batches: int) -> int:
    """Return the idle time: with a flush, one forward and one backward pass for each other stage (arXiv 2104.04473)."""
    return 3 * (chunks.num_stages - 1)


def in_flight(chunks: ModelChunks, micro_batches: int, stage: int) -> float:
    """Return the number of micro-batches held: one for this stage, and one for each later stage."""
    return min(chunks.num_stages - stage, micro_batches)


SCHEDULE = PipelineSchedule(
    name="1f1b",
    paper="1806.03377",
    order=one_forward_one_backward,
    waits=waits,
    in_flight=in_flight,
)
