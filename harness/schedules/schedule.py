"""A pipeline schedule: the order of passes on each stage, idle time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from harness.schedules.chunks import ModelChunks


class Kind(Enum):
    """A kind of pass: what a stage computes for a micro-batch."""

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
        waits: returns a stage's idle time per step, given the model chunks (of 2 stages or more) and the number of
            micro-batches, in units of the forward pass of one chunk. Input gradients and weight gradients take one unit
            each.
        in_flight: returns the peak number of micro-batches whose activations a stage holds, with the arguments of
            `order`. The activations of one chunk count as their fraction of a stage.
        chunks: number of model chunks per stage; None if the config chooses it.
        folded: whether every other round of chunks runs backwards through the stages.
        defers: whether weight gradients may be computed at the very end.
        defers_by_stage: whether stage s keeps the operands of weight gradients for s micro-batches.
        predicted_as: name of the schedule with the same memory and time, except for the number of chunks; "" for none.
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
