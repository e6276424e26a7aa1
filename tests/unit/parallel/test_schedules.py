"""Schedules: what is sent is received in order, no stage waits for ever, memory and idle time are as in the papers."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from harness.config.values.batch import bubble, micro_batches_wanted
from harness.config.values.layout_keys import DEEPSPEED_1F1B, NON_WAITING_1F1B, SCHEDULES, ZERO_BUBBLE
from harness.parallel.pipeline.schedules.instructions import Action, Instruction, instructions, most_in_flight
from harness.parallel.pipeline.schedules.passes import ORDERS, Kind, Pass, one_forward_one_backward, zero_bubble_h1
from harness.parallel.pipeline.schedules.timeline import end_of, idle_share, timeline

SIZES = list(product(range(1, 8), (1, 2, 3, 4, 7, 8, 13)))  # stages, micro-batches
# Transfers, by the direction in which they go: a stage does those of a direction one after the other.
FORWARDS = {Action.SEND_ACTIVATION, Action.RECEIVE_ACTIVATION}
BACKWARDS = {Action.SEND_GRADIENT: -1, Action.RECEIVE_GRADIENT: 1}
PEER = {Action.SEND_ACTIVATION: 1, Action.RECEIVE_ACTIVATION: -1, **BACKWARDS}
SENDS = {Action.SEND_ACTIVATION, Action.SEND_GRADIENT}


def programs(name: str, stages: int, micro_batches: int) -> list[deque[Instruction]]:
    """What each stage executes."""
    orders = [ORDERS[name](stages, micro_batches, stage) for stage in range(stages)]
    return [deque(instructions(order, stages, stage)) for stage, order in enumerate(orders)]


def execute(own: list[deque[Instruction]]) -> None:
    """Execute the stages' programs; AssertionError where a transfer does not match, or stages wait for ever.

    The strictest rules there are: a send is held back until its receive begins, and holds up the later transfers of its
    direction, on both sides. It does not hold up the stage itself.
    """
    lines: dict[tuple[int, bool], deque[Instruction]] = {
        (stage, forwards): deque() for stage in range(len(own)) for forwards in (False, True)
    }
    while any(own) or any(lines.values()):
        moved = False
        for stage, program in enumerate(own):
            receives = [
                line for line in (lines[stage, True], lines[stage, False]) if line and line[-1].action not in SENDS
            ]
            while program and not receives:
                instruction = program.popleft()
                moved = True
                if instruction.action in PEER:
                    lines[stage, instruction.action in FORWARDS].append(instruction)
                    receives = [] if instruction.action in SENDS else [lines[stage, instruction.action in FORWARDS]]
        for (stage, forwards), line in lines.items():
            if line and line[0].action in SENDS:
                other = lines[stage + PEER[line[0].action], forwards]
                if other and other[0].action not in SENDS:
                    assert other.popleft().micro_batch == line.popleft().micro_batch
                    moved = True
        assert moved, "stages wait for each other for ever"


@pytest.mark.parametrize("name", ORDERS)
def test_every_send_has_its_receive_and_no_stage_waits_for_ever(name: str) -> None:
    for stages, micro_batches in SIZES:
        execute(programs(name, stages, micro_batches))


def test_stages_that_wait_for_each_other_are_found() -> None:
    own = programs(ZERO_BUBBLE, 2, 2)
    own[1].append(Instruction(Action.RECEIVE_ACTIVATION, 2))
    with pytest.raises(AssertionError, match="for ever"):
        execute(own)
    with pytest.raises(ValueError, match="2 stages and 1 micro-batch wait"):
        timeline(lambda p, m, s: iter(list(zero_bubble_h1(p, m, s))[:: 1 if s else -1]), 2, 1)  # backward first


@pytest.mark.parametrize("name", ORDERS)
def test_each_pass_comes_once_and_in_the_order_of_the_micro_batches(name: str) -> None:
    kinds = {NON_WAITING_1F1B: {Kind.FORWARD, Kind.BACKWARD}, ZERO_BUBBLE: set(Kind) - {Kind.BACKWARD}}[name]
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            passes = list(ORDERS[name](stages, micro_batches, stage))
            for kind in Kind:
                expected = list(range(micro_batches)) if kind in kinds else []
                assert [each.micro_batch for each in passes if each.kind is kind] == expected


def test_1f1b_computes_in_deepspeeds_order() -> None:
    kinds = {ForwardPass: Kind.FORWARD, BackwardPass: Kind.BACKWARD}
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            schedule = TrainSchedule(micro_batches, stages, stage)
            theirs = [kinds[type(c)] for commands in schedule.steps() for c in commands if type(c) in kinds]
            passes = list(one_forward_one_backward(stages, micro_batches, stage))
            assert [each.kind for each in passes] == theirs
            assert max(2, most_in_flight(passes)) == schedule.num_pipe_buffers()


def most_held(passes: list[Pass], *, ends: set[Kind]) -> int:
    """The most micro-batches that a stage holds something of: from the forward pass to the pass that ends it."""
    held = [0]
    for each in passes:
        held.append(held[-1] + (each.kind is Kind.FORWARD) - (each.kind in ends))
    return max(held)


def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b() -> None:
    for stages, micro_batches in SIZES:
        first = most_in_flight(one_forward_one_backward(stages, micro_batches, 0))
        for stage in range(stages):
            passes = list(zero_bubble_h1(stages, micro_batches, stage))
            assert most_in_flight(passes) == most_in_flight(one_forward_one_backward(stages, micro_batches, stage))
            assert most_held(passes, ends={Kind.WEIGHT_GRADIENTS}) <= first


@pytest.mark.parametrize("name", ORDERS)
def test_the_idle_share_is_that_of_the_formula(name: str) -> None:
    for stages, micro_batches in SIZES:
        assert idle_share(timeline(ORDERS[name], stages, micro_batches)) == pytest.approx(
            bubble(stages, micro_batches, name)
        )


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (1, 1.2, 0.8), (1, 2, 1), (1, 1, 0.5)])
def test_zero_bubble_waits_as_in_the_paper_for_passes_of_any_length(
    forward: float, inputs: float, weights: float
) -> None:
    # table 1 of the paper, for weight gradients that take no longer than the others
    durations = {Kind.FORWARD: forward, Kind.INPUT_GRADIENTS: inputs, Kind.WEIGHT_GRADIENTS: weights}
    for stages, micro_batches in ((2, 8), (4, 8), (8, 16)):
        waits = end_of(timeline(zero_bubble_h1, stages, micro_batches, durations), durations) - micro_batches * sum(
            durations.values()
        )
        assert waits == pytest.approx((stages - 1) * (forward + inputs - weights))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_micro_batches_wanted_leave_a_fifth_idle_or_less(name: str) -> None:
    for stages in (2, 3, 8):
        wanted = micro_batches_wanted(stages, name)
        assert bubble(stages, wanted, name) <= 0.2 < bubble(stages, wanted - 1, name)
    assert micro_batches_wanted(4, ZERO_BUBBLE) == 4 < micro_batches_wanted(4, DEEPSPEED_1F1B) == 12
