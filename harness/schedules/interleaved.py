"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): several model chunks a stage.

A micro-batch passes through all stages once for each chunk of a stage. A chunk is a fraction of a stage, so the waits
at both ends of a step are shorter by that factor. Micro-batches go through a chunk in groups of at least as many as
there are stages, if a step has that many. Megatron requires the number of stages to divide that of micro-batches; here
the sizes of groups may differ by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

from harness.schedules.chunks import ModelChunks
from harness.schedules.schedule import Kind, Pass, PipelineSchedule


def interleaved(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under interleaved 1F1B."""
    forwards = list(_grouped(Kind.FORWARD, chunks.of_stage(stage), _groups(chunks.num_stages, micro_batches)))
    backwards = _grouped(Kind.BACKWARD, chunks.of_stage(stage)[::-1], _groups(chunks.num_stages, micro_batches))
    yield from _in_turns(forwards, list(backwards), _ahead(chunks, micro_batches, stage))


def _groups(num_stages: int, micro_batches: int) -> list[range]:
    """Return the groups in which micro-batches go through a chunk, larger ones first."""
    count = max(1, micro_batches // num_stages)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _grouped(kind: Kind, chunks: list[int], groups: list[range]) -> Iterator[Pass]:
    for group in groups:
        for chunk in chunks:
            for index in group:
                yield Pass(kind, index, chunk)


def _ahead(chunks: ModelChunks, micro_batches: int, stage: int) -> int:
    """Return the number of forward passes before the first backward pass.

    Each later stage has 2 fewer: one hop less for activations to the end, one less for gradients back. All chunks but
    the last run their first group before the first backward pass.
    """
    largest = ceil(micro_batches / max(1, micro_batches // chunks.num_stages))
    return 2 * (chunks.num_stages - 1 - stage) + (chunks.per_stage - 1) * largest + 1


def _in_turns(forwards: list[Pass], backwards: list[Pass], ahead: int) -> Iterator[Pass]:
    yield from forwards[:ahead]
    for index, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + index : ahead + index + 1]


def waits(chunks: ModelChunks, micro_batches: int) -> int:
    """Return the idle time: as under 1F1B, by chunks; more if groups have fewer micro-batches than stages."""
    p = chunks.num_stages
    missing = max(0, chunks.num_stages - micro_batches)
    return 3 * (p - 1) + 3 * (chunks.per_stage - 1) * missing


def in_flight(chunks: ModelChunks, micro_batches: int, stage: int) -> float:
    """Return the number of micro-batches held, counted in passes of one chunk: a group in all chunks but one, two for
    each later stage, and one more."""
    return min(_ahead(chunks, micro_batches, stage) / chunks.per_stage, micro_batches)


SCHEDULE = PipelineSchedule(
    name="interleaved",
    paper="2104.04473",
    order=interleaved,
    waits=waits,
    in_flight=in_flight,
    chunks=None,
    predicted_as="1f1b",
)
