"""The order in which each stage of a pipeline computes, where a stage has one model chunk.

GPipe (Huang et al. 2019, arXiv 1811.06965) runs all forward passes and then all backward passes. 1F1B (Narayanan et al.
2019, PipeDream, SOSP) runs a few forward passes ahead and then one forward and one backward pass in turns. ZB-H1 (Qi et
al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1) splits the backward pass: the gradients of
inputs, for which the stage before waits, come at once; those of weights, for which nobody waits, are put off until the
stage would be idle. A stage puts off no more of them than it has fewer forward passes ahead than the first stage, so no
stage holds more activations than the first one does under 1F1B.

Each order is a pure function of the model chunks, the micro-batches and the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from harness.config.values.model_chunks import ModelChunks


class Kind(Enum):
    """What a stage computes for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B+W"  # the gradients of inputs and weights together
    INPUT_GRADIENTS = "B"
    WEIGHT_GRADIENTS = "W"


@dataclass(frozen=True)
class Pass:
    """One micro-batch's computation of one kind, by one model chunk."""

    kind: Kind
    micro_batch: int
    chunk: int


Order = Callable[[ModelChunks, int, int], Iterator[Pass]]
"""Of chunks, micro-batches and stage: the passes of that stage."""


def gpipe(_parts: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under GPipe."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for index in range(micro_batches):
            yield Pass(kind, index, stage)


def one_forward_one_backward(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under 1F1B."""
    ahead = min(chunks.stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index, stage)
    for index in range(micro_batches):
        yield Pass(Kind.BACKWARD, index, stage)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index, stage)


def zero_bubble_h1(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-H1; `stage` is also how many weight gradients it puts off at most."""
    ahead = min(chunks.stages - stage, micro_batches)
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
