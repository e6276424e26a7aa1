"""Turn the passes of a schedule into pipeline instructions, adding receives, loads and sends.

A stage receives a tensor just before the pass that needs it, and sends one just after the pass that produces it. Sends
do not block. Activations and gradients have separate channels for each direction, and arrive in the order in which they
are sent. So no two stages deadlock, even if a send completes only when its receive begins, as under NCCL. Two
neighbouring chunks of one stage exchange tensors the same way within the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from torch import nn

from harness.deepspeed.schedule import Schedule, StageProgram
from harness.parallel.weight_gradients import DeferredGradients, attach
from harness.schedules import DEFAULT, SCHEDULES, Kind, ModelChunks, Pass


class Action(StrEnum):
    """The kinds of instructions, under the names that logs and messages show."""

    RECEIVE_ACTIVATION = "RecvActivation"
    LOAD = "LoadMicroBatch"
    FORWARD = "ForwardPass"
    SEND_ACTIVATION = "SendActivation"
    RECEIVE_GRADIENT = "RecvGrad"
    BACKWARD = "BackwardPass"
    INPUT_GRADIENTS = "InputGradients"
    SEND_GRADIENT = "SendGrad"
    WEIGHT_GRADIENTS = "WeightGradients"


COMPUTES = {
    Kind.FORWARD: Action.FORWARD,
    Kind.BACKWARD: Action.BACKWARD,
    Kind.INPUT_GRADIENTS: Action.INPUT_GRADIENTS,
    Kind.WEIGHT_GRADIENTS: Action.WEIGHT_GRADIENTS,
}


@dataclass(frozen=True)
class Instruction:
    """One action for one micro-batch, in one model chunk."""

    action: Action
    micro_batch: int
    chunk: int


def instructions(passes: Iterable[Pass], chunks: int) -> Iterator[Instruction]:
    """Yield a stage's instructions: its passes, with sends, receives and loads. The model has `chunks` chunks."""
    for each in passes:
        first, last = each.chunk == 0, each.chunk == chunks - 1
        before: list[Action] = []
        after: list[Action] = []
        if each.kind is Kind.FORWARD:
            before += [] if first else [Action.RECEIVE_ACTIVATION]
            # The first chunk reads inputs, the last one labels.
            before += [Action.LOAD] if first or last else []
            after += [] if last else [Action.SEND_ACTIVATION]
        # Before weight gradients, the input's gradient has been sent, and they need none from another stage.
        elif each.kind is not Kind.WEIGHT_GRADIENTS:
            before += [] if last else [Action.RECEIVE_GRADIENT]
            after += [] if first else [Action.SEND_GRADIENT]
        for action in (*before, COMPUTES[each.kind], *after):
            yield Instruction(action, each.micro_batch, each.chunk)


def most_in_flight(passes: Iterable[Pass]) -> int:
    """Return the peak number of micro-batches between the start of forward and the end of backward.

    A micro-batch counts once for each chunk of the stage. For one chunk it is the number of buffers needed.
    """
    found = list(passes)
    return most_kept(found, {each.chunk: 1 for each in found})


def most_kept(passes: Iterable[Pass], sizes: Mapping[int, int]) -> int:
    """Return the peak memory kept for backward passes; `sizes` is the memory kept by one pass, by chunk."""
    most = now = 0
    for each in passes:
        if each.kind is Kind.FORWARD:
            now += sizes[each.chunk]
            most = max(most, now)
        elif each.kind is not Kind.WEIGHT_GRADIENTS:
            now -= sizes[each.chunk]
    return most


def buffers(passes: Iterable[Pass]) -> int:
    """Return the number of buffers that each chunk of a stage needs."""
    by_chunk: dict[int, list[Pass]] = {}
    for each in passes:
        by_chunk.setdefault(each.chunk, []).append(each)
    return max(map(most_in_flight, by_chunk.values()))


def make_schedule(module: nn.Module, name: str, chunks: ModelChunks, stage: int, micro_batches: int) -> Schedule:
    """Return the schedule `name` for the stage of `module`, whose layers may be made to defer weight gradients.

    Args:
        micro_batches: number of micro-batches in a training step.
    """
    # A single stage never waits: no order of passes is faster, and the default keeps the fewest activations.
    order = SCHEDULES[name if chunks.num_stages > 1 else DEFAULT].order
    deferred = DeferredGradients()
    defers = any(each.kind is Kind.WEIGHT_GRADIENTS for each in order(chunks, micro_batches, stage))
    if defers:
        attach(module, deferred)

    def training(micro_batches: int) -> StageProgram:
        passes = list(order(chunks, micro_batches, stage))
        return _program(passes, chunks, buffers(passes))

    def evaluation(micro_batches: int) -> StageProgram:
        forwards = [each for each in order(chunks, micro_batches, stage) if each.kind is Kind.FORWARD]
        # One buffer is enough, as no backward pass comes back to a micro-batch.
        return _program(forwards, chunks, 1)

    return Schedule(
        chunks=chunks, training=cache(training), evaluation=cache(evaluation), deferred=deferred, defers=defers
    )


def _program(passes: Sequence[Pass], chunks: ModelChunks, buffers_of_a_chunk: int) -> StageProgram:
    return StageProgram(
        instructions=[(each.action.value, each.micro_batch, each.chunk) for each in instructions(passes, chunks.count)],
        buffers=buffers_of_a_chunk,
    )
