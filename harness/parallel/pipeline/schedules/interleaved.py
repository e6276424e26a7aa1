"""The order in which each stage computes, where the parts of the model go round the stages.

A micro-batch passes through all stages once for each part that a stage has, so a stage waits for a smaller part at the
beginning and at the end of a step. Looped BFS (Lamy-Poirier 2023, Breadth-First Pipeline Parallelism, arXiv 2211.05953)
sends all micro-batches through one part, then through the next. Interleaved 1F1B (Narayanan et al. 2021, arXiv
2104.04473, section 2.2) sends them in groups, and computes a forward and a backward pass in turns. Its zero-bubble form
puts off weight gradients as ZB-H1 does.

A group has at least as many micro-batches as there are stages, if there are so many in a step. Megatron demands that
the stages divide the micro-batches; here the groups may differ by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.config.values.stage_parts import StageParts
from harness.parallel.pipeline.schedules.passes import Kind, Pass


def looped_bfs(parts: StageParts, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under looped BFS."""
    own = parts.of_stage(stage)
    for kind, in_order in ((Kind.FORWARD, own), (Kind.BACKWARD, own[::-1])):
        for part in in_order:
            for index in range(micro_batches):
                yield Pass(kind, index, part)


def interleaved(parts: StageParts, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under interleaved 1F1B."""
    forwards = list(_grouped(Kind.FORWARD, parts.of_stage(stage), _groups(parts.stages, micro_batches)))
    backwards = _grouped(Kind.BACKWARD, parts.of_stage(stage)[::-1], _groups(parts.stages, micro_batches))
    yield from _in_turns(forwards, list(backwards), _ahead(parts, micro_batches, stage))


def interleaved_zero_bubble(parts: StageParts, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under interleaved 1F1B that puts off the weight gradients of `stage` passes."""
    groups = _groups(parts.stages, micro_batches)
    forwards = list(_grouped(Kind.FORWARD, parts.of_stage(stage), groups))
    inputs = list(_grouped(Kind.INPUT_GRADIENTS, parts.of_stage(stage)[::-1], groups))
    weights = _grouped(Kind.WEIGHT_GRADIENTS, parts.of_stage(stage)[::-1], groups)
    done = 0
    for each in _in_turns(forwards, inputs, _ahead(parts, micro_batches, stage)):
        yield each
        done += each.kind is Kind.INPUT_GRADIENTS
        if each.kind is Kind.INPUT_GRADIENTS and done > stage:
            yield next(weights)
    yield from weights


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Return the groups of micro-batches that follow each other through a part, the larger ones first."""
    count = max(1, micro_batches // stages)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _grouped(kind: Kind, parts: list[int], groups: list[range]) -> Iterator[Pass]:
    for group in groups:
        for part in parts:
            for index in group:
                yield Pass(kind, index, part)


def _ahead(parts: StageParts, micro_batches: int, stage: int) -> int:
    """Return how many forward passes come before the first backward pass."""
    largest = len(_groups(parts.stages, micro_batches)[0])
    return 2 * (parts.stages - 1 - stage) + (parts.each - 1) * largest + 1


def _in_turns(forwards: list[Pass], backwards: list[Pass], ahead: int) -> Iterator[Pass]:
    yield from forwards[:ahead]
    for index, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + index : ahead + index + 1]
