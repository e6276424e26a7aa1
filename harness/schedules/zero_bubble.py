"""ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1): split backward passes.

Input gradients are computed at once, because the previous stage waits for them. Weight gradients are needed only by the
update, and are deferred until the stage would be idle. Stage s defers at most s of them, so no stage holds more
activations than the first one under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.schedules.chunks import ModelChunks
from harness.schedules.one_forward_one_backward import in_flight
from harness.schedules.schedule import Kind, Pass, PipelineSchedule


def zero_bubble_h1(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-H1; it defers at most `stage` weight gradients."""
    ahead = min(chunks.num_stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index, stage)
    for index in range(micro_batches):
        yield Pass(Kind.INPUT_GRADIENTS, index, stage)
        if index >= stage:
            yield Pass(Kind.WEIGHT_GRADIENTS, index - stage, stage)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index, stage)
    for index in range(max(0, micro_batches - stage), micro_batches):
        yield Pass(Kind.WEIGHT_GRADIENTS, index, stage)


def waits(chunks: ModelChunks, micro_batches: int) -> int:
    """Return the idle time: a third of 1F1B's, if there are enough micro-batches to fill it with weight gradients."""
    return chunks.num_stages - 1 + max(0, chunks.num_stages - micro_batches)


SCHEDULE = PipelineSchedule(
    name="zero-bubble",
    paper="2401.10241",
    order=zero_bubble_h1,
    waits=waits,
    in_flight=in_flight,
    defers=True,
    defers_by_stage=True,
)
