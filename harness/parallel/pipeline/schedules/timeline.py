"""When each pass of a pipeline begins, if every pass of a kind takes equally long and transfers take no time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.parallel.pipeline.schedules.passes import Kind, Order, Pass
from harness.wording import counted

Begins = dict[tuple[int, Pass], float]
"""Of each stage and pass: when it begins."""

UNITS: Mapping[Kind, float] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT_GRADIENTS: 1,
    Kind.WEIGHT_GRADIENTS: 1,
}
"""How long passes take where forward, input gradients and weight gradients take equally long."""


def timeline(order: Order, stages: int, micro_batches: int, durations: Mapping[Kind, float] = UNITS) -> Begins:
    """Return when each pass begins: as soon as its stage is free and what it needs from a neighbour is there.

    Raises ValueError for an order in which stages wait for each other for ever.
    """
    passes = [list(order(stages, micro_batches, stage)) for stage in range(stages)]
    begins: Begins = {}
    free, position = [0.0] * stages, [0] * stages
    while any(at < len(own) for at, own in zip(position, passes, strict=True)):
        before = sum(position)
        for stage, own in enumerate(passes):
            while position[stage] < len(own):
                needed = _needed(passes, stage, own[position[stage]])
                if needed is not None and needed not in begins:
                    break
                ready = 0.0 if needed is None else begins[needed] + durations[needed[1].kind]
                begins[stage, own[position[stage]]] = begin = max(free[stage], ready)
                free[stage] = begin + durations[own[position[stage]].kind]
                position[stage] += 1
        if sum(position) == before:
            batches = counted(micro_batches, "micro-batch", "micro-batches")
            raise ValueError(f"{stages} stages and {batches} wait for each other for ever")
    return begins


def _needed(passes: Sequence[Sequence[Pass]], stage: int, own: Pass) -> tuple[int, Pass] | None:
    """Return the pass of a neighbour whose result a pass takes."""
    if own.kind is Kind.WEIGHT_GRADIENTS:
        return None
    neighbour = stage - 1 if own.kind is Kind.FORWARD else stage + 1
    if not 0 <= neighbour < len(passes):
        return None
    kinds = {own.kind} if own.kind is Kind.FORWARD else {Kind.BACKWARD, Kind.INPUT_GRADIENTS}
    return next(
        (neighbour, each) for each in passes[neighbour] if each.micro_batch == own.micro_batch and each.kind in kinds
    )


def end_of(begins: Begins, durations: Mapping[Kind, float] = UNITS) -> float:
    """Return when the last pass of a timeline ends."""
    return max(begin + durations[each.kind] for (_, each), begin in begins.items())


def idle_share(begins: Begins, durations: Mapping[Kind, float] = UNITS) -> float:
    """Return the share of a step in which stages compute nothing."""
    stages = 1 + max(stage for stage, _ in begins)
    busy = sum(durations[each.kind] for _, each in begins)
    return 1 - busy / (stages * end_of(begins, durations))
