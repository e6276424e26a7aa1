"""A pipeline schedule: the order in which each stage computes, its idle time and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from harness.schedules.chunks import ModelChunks


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
"""Called with the model chunks, the number of micro-batches and the stage; yields the passes of that stage."""


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A pipeline schedule.

    Attributes:
        name: value of `pipeline.schedule`.
        paper: number of the arXiv paper that describes it; schedules are listed in this order.
        order: the passes of a stage.
        waits: called with the model chunks (of 2 stages or more) and the number of micro-batches; returns the time that
            a stage waits in a step, in units of the forward pass of one chunk. Input gradients and weight gradients
            take one unit each.
        in_flight: called as `order` is; returns the largest number of micro-batches whose activations the stage holds
            at once. One chunk's activations count as their fraction of a stage.
        chunks: number of model chunks of each stage; None: the config chooses it.
        folded: whether every other round of chunks runs backwards through the stages.
        defers: whether weight gradients may be computed last of all.
        defers_by_stage: whether stage s keeps the operands of weight gradients for s micro-batches.
        predicted_as: name of the schedule whose memory and time it has, but for the number of chunks; "" for its own.
    """

    name: str
    paper: str
    order: Order
    waits: Callable[[ModelChunks, int], int]
    in_flight: Callable[[ModelChunks, int, int], float]
    chunks: int | None = 1
    folded: bool = False
    defers: bool = False
    defers_by_stage: bool = False
    predicted_as: str = ""
