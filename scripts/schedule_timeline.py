"""Simulate a schedule: when each pass begins, if all passes of a kind take equally long and transfers take no time."""

from __future__ import annotations

from collections.abc import Mapping

from harness.schedules import Kind, ModelChunks, Order, Pass
from harness.wording import counted

Begins = dict[tuple[int, Pass], float]
"""(stage, pass) -> the time at which it begins."""

UNITS: Mapping[Kind, float] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT_GRADIENTS: 1,
    Kind.WEIGHT_GRADIENTS: 1,
}
"""Durations of passes if forward, input gradients and weight gradients take one unit of time each."""


def timeline(order: Order, chunks: ModelChunks, micro_batches: int, durations: Mapping[Kind, float] = UNITS) -> Begins:
    """Return when each pass begins: as soon as its stage is free and its input from the neighbouring chunk has come.

    Raises ValueError for an order that deadlocks.
    """
    passes = [list(order(chunks, micro_batches, stage)) for stage in range(chunks.num_stages)]
    begins: Begins = {}
    ends: dict[tuple[bool, int, int], float] = {}  # of the forward and backward pass of each chunk and micro-batch
    free, position = [0.0] * chunks.num_stages, [0] * chunks.num_stages
    while any(at < len(own) for at, own in zip(position, passes, strict=True)):
        before = sum(position)
        for stage, own in enumerate(passes):
            while position[stage] < len(own):
                each = own[position[stage]]
                needed = _needed(each, chunks)
                if needed is not None and needed not in ends:
                    break
                begins[stage, each] = begin = max(free[stage], 0.0 if needed is None else ends[needed])
                free[stage] = begin + durations[each.kind]
                if each.kind is not Kind.WEIGHT_GRADIENTS:
                    ends[each.kind is Kind.FORWARD, each.chunk, each.micro_batch] = free[stage]
                position[stage] += 1
        if sum(position) == before:  # no stage could go on
            batches = counted(micro_batches, "micro-batch", "micro-batches")
            raise ValueError(f"{chunks.num_stages} stages with {batches} deadlock under this order")
    return begins


def _needed(own: Pass, chunks: ModelChunks) -> tuple[bool, int, int] | None:
    """Return the pass whose result a pass needs: whether it is a forward pass, its chunk and its micro-batch.

    None for the first chunk's forward passes and for weight gradients, which need nothing from another chunk.
    """
    if own.kind is Kind.WEIGHT_GRADIENTS:
        return None
    forward = own.kind is Kind.FORWARD
    neighbour = own.chunk - 1 if forward else own.chunk + 1
    if neighbour == chunks.count:  # the last chunk's backward needs only its own forward, which gives the loss
        return True, own.chunk, own.micro_batch
    return (forward, neighbour, own.micro_batch) if neighbour >= 0 else None


def end_of(begins: Begins, durations: Mapping[Kind, float] = UNITS) -> float:
    """Return when the last pass of a timeline ends."""
    return max(begin + durations[each.kind] for (_, each), begin in begins.items())


def idle_share(begins: Begins, durations: Mapping[Kind, float] = UNITS) -> float:
    """Return the share of a step in which stages compute nothing."""
    stages = 1 + max(stage for stage, _ in begins)
    busy = sum(durations[each.kind] for _, each in begins)
    return 1 - busy / (stages * end_of(begins, durations))
