"""The order in which each stage of a pipeline computes, as a pure function of stages, micro-batches and stage.

1F1B (Narayanan et al. 2019, PipeDream, SOSP) runs a few forward passes ahead and then one forward and one backward
pass in turns. ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1) splits the
backward pass: the gradients of inputs, for which the stage before waits, come at once; those of weights, for which
nobody waits, are put off until the stage would be idle. A stage puts off no more of them than it has fewer forward
passes ahead than the first stage, so no stage holds more activations than the first one does under 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from harness.config.values.layout_keys import NON_WAITING_1F1B, ZERO_BUBBLE


class Kind(Enum):
    """What a stage computes for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B+W"  # the gradients of inputs and weights together
    INPUT_GRADIENTS = "B"
    WEIGHT_GRADIENTS = "W"


@dataclass(frozen=True)
class Pass:
    """One micro-batch's computation of one kind, on one stage."""

    kind: Kind
    micro_batch: int


def one_forward_one_backward(stages: int, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under 1F1B."""
    ahead = min(stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index)
    for index in range(micro_batches):
        yield Pass(Kind.BACKWARD, index)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index)


def zero_bubble_h1(stages: int, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-H1; `stage` is also how many weight gradients it puts off at most."""
    ahead = min(stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index)
    for index in range(micro_batches):
        yield Pass(Kind.INPUT_GRADIENTS, index)
        if index >= stage:
            yield Pass(Kind.WEIGHT_GRADIENTS, index - stage)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index)
    for index in range(max(0, micro_batches - stage), micro_batches):
        yield Pass(Kind.WEIGHT_GRADIENTS, index)


Order = Callable[[int, int, int], Iterator[Pass]]
"""Of stages, micro-batches and stage: the passes of that stage."""

ORDERS: Mapping[str, Order] = {NON_WAITING_1F1B: one_forward_one_backward, ZERO_BUBBLE: zero_bubble_h1}
"""The schedules of the harness by their names in `pipeline.schedule`; the default, DeepSpeed's own, is not here."""
