"""Interleaved 1F1B: the order in which each stage computes, where the model chunks go round the stages.

A micro-batch passes through all stages once for each chunk that a stage has. A chunk is a fraction of a stage, so the
waits at the beginning and at the end of a step are that much shorter. Micro-batches go in groups, and a stage computes
one forward and one backward pass in turns (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

A group has at least as many micro-batches as there are stages, if a step has so many. Megatron demands that the stages
divide the micro-batches; here the groups may differ by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.config.values.model_chunks import ModelChunks
from harness.parallel.pipeline.schedules.passes import Kind, Pass


def interleaved(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under interleaved 1F1B."""
    forwards = list(_grouped(Kind.FORWARD, chunks.of_stage(stage), _groups(chunks.stages, micro_batches)))
    backwards = _grouped(Kind.BACKWARD, chunks.of_stage(stage)[::-1], _groups(chunks.stages, micro_batches))
    yield from _in_turns(forwards, list(backwards), _ahead(chunks, micro_batches, stage))


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Return the groups of micro-batches that follow each other through a chunk, the larger ones first."""
    count = max(1, micro_batches // stages)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _grouped(kind: Kind, chunks: list[int], groups: list[range]) -> Iterator[Pass]:
    for group in groups:
        for chunk in chunks:
            for index in group:
                yield Pass(kind, index, chunk)


def _ahead(chunks: ModelChunks, micro_batches: int, stage: int) -> int:
    """Return how many forward passes come before the first backward pass."""
    largest = len(_groups(chunks.stages, micro_batches)[0])
    return 2 * (chunks.stages - 1 - stage) + (chunks.each - 1) * largest + 1


def _in_turns(forwards: list[Pass], backwards: list[Pass], ahead: int) -> Iterator[Pass]:
    yield from forwards[:ahead]
    for index, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + index : ahead + index + 1]
