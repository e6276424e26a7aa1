"""Schedules: what is sent is received in order, no stage waits for ever, memory and idle time are as in the papers."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from harness.config.values.batch import bubble, micro_batches_wanted
from harness.parallel.pipeline.instructions import (
    Action,
    Instruction,
    buffers,
    instructions,
    most_in_flight,
    most_kept,
)
from harness.schedules import DEFAULT, INTERLEAVED, SCHEDULES, Kind, ModelChunks, Pass, model_chunks
from harness.schedules.one_forward_one_backward import one_forward_one_backward
from harness.schedules.zero_bubble import zero_bubble_h1
from scripts.schedule_timeline import end_of, idle_share, timeline

FOLDED = [name for name, each in SCHEDULES.items() if each.folded]

SIZES = list(product(range(1, 8), (1, 2, 3, 4, 7, 8, 13)))  # stages, micro-batches
# Transfers, by the direction in which they go: a stage does those of a direction one after the other.
FORWARDS = {Action.SEND_ACTIVATION, Action.RECEIVE_ACTIVATION}
BACKWARDS = {Action.SEND_GRADIENT: -1, Action.RECEIVE_GRADIENT: 1}
PEER = {Action.SEND_ACTIVATION: 1, Action.RECEIVE_ACTIVATION: -1, **BACKWARDS}
SENDS = {Action.SEND_ACTIVATION, Action.SEND_GRADIENT}


def chunkings(name: str, stages: int) -> list[ModelChunks]:
    """How a schedule may cut the model."""
    if name in FOLDED and stages == 1:
        return []
    several = name == INTERLEAVED and stages > 1
    return [model_chunks(stages, name, asked) for asked in ((2, 3) if several else (None,))]


def programs(name: str, chunks: ModelChunks, micro_batches: int) -> list[deque[Instruction]]:
    """What each stage executes."""
    orders = [SCHEDULES[name].order(chunks, micro_batches, stage) for stage in range(chunks.num_stages)]
    return [deque(instructions(order, chunks.count)) for order in orders]


def execute(own: list[deque[Instruction]], chunks: ModelChunks) -> None:
    """Execute the stages' programs; AssertionError where a transfer does not match, or stages wait for ever.

    The strictest rules there are: a send is held back until its receive begins, and holds up the later transfers of its
    kind to the same stage. It does not hold up the stage itself.
    """
    lines: dict[tuple[bool, int, int], tuple[deque[Instruction], deque[Instruction]]] = {}
    blocked: set[int] = set()  # stages that wait for a receive

    def line(stage: int, each: Instruction) -> tuple[deque[Instruction], deque[Instruction]]:
        other = chunks.stage_of(each.chunk + PEER[each.action])
        ends = (stage, other) if each.action in SENDS else (other, stage)
        return lines.setdefault((each.action in FORWARDS, *ends), (deque(), deque()))

    while any(own) or blocked:
        moved = False
        for stage, program in enumerate(own):
            while program and stage not in blocked:
                each, moved = program.popleft(), True
                if each.action in PEER:
                    line(stage, each)[each.action not in SENDS].append(each)
                    if each.action not in SENDS:
                        blocked.add(stage)
        for (_, _, to), (sent, received) in lines.items():
            if sent and received:
                sends, receives = sent.popleft(), received.popleft()
                assert (sends.micro_batch, sends.chunk + PEER[sends.action]) == (receives.micro_batch, receives.chunk)
                moved = True
                blocked.remove(to)
        assert moved, "stages wait for each other for ever"
    assert not any(sent for sent, _ in lines.values()), "a send has no receive"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_send_has_its_receive_and_no_stage_waits_for_ever(name: str) -> None:
    for stages, micro_batches in SIZES:
        for chunks in chunkings(name, stages):
            execute(programs(name, chunks, micro_batches), chunks)


def test_stages_that_wait_for_each_other_are_found() -> None:
    chunks = ModelChunks(2)
    own = programs("zero-bubble", chunks, 2)
    own[1].append(Instruction(Action.RECEIVE_ACTIVATION, 2, 1))
    with pytest.raises(AssertionError, match="for ever"):
        execute(own, chunks)
    with pytest.raises(ValueError, match="2 stages with 1 micro-batch deadlock"):
        timeline(lambda p, m, s: iter(list(zero_bubble_h1(p, m, s))[:: 1 if s else -1]), chunks, 1)  # backward first


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_pass_comes_once_and_in_the_order_of_the_micro_batches(name: str) -> None:
    # so the gradients of a parameter are summed in the same order by every schedule
    for stages, micro_batches in SIZES:
        for chunks, stage in ((chunks, stage) for chunks in chunkings(name, stages) for stage in range(stages)):
            passes = list(SCHEDULES[name].order(chunks, micro_batches, stage))
            for chunk in chunks.of_stage(stage):
                own = [each for each in passes if each.chunk == chunk]
                at = {each: index for index, each in enumerate(own)}
                forward, inputs, weights = (
                    [each for each in own if each.kind in kinds]
                    for kinds in (
                        {Kind.FORWARD},
                        {Kind.BACKWARD, Kind.INPUT_GRADIENTS},
                        {Kind.BACKWARD, Kind.WEIGHT_GRADIENTS},
                    )
                )
                for one in (forward, inputs, weights):
                    assert [each.micro_batch for each in one] == list(range(micro_batches))
                assert all(at[a] < at[b] <= at[c] for a, b, c in zip(forward, inputs, weights, strict=True))
            assert SCHEDULES[name].defers or {each.kind for each in passes} == {Kind.FORWARD, Kind.BACKWARD}
            put_off, computed = (
                [(each.micro_batch, each.chunk) for each in passes if each.kind is kind]
                for kind in (Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS)
            )
            assert put_off == computed


@pytest.mark.parametrize("name", FOLDED)
def test_the_first_stage_has_the_first_and_the_last_part_of_a_folded_model(name: str) -> None:
    chunks = model_chunks(4, name)
    assert [chunks.of_stage(stage) for stage in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert chunks.loss_stage == 0
    round_robin = model_chunks(4, INTERLEAVED, 3)
    assert round_robin.of_stage(1) == [1, 5, 9] and round_robin.loss_stage == 3


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 9), (4, 16), (8, 32)])
def test_several_chunks_hold_as_many_activations_as_in_the_papers(stages: int, micro_batches: int) -> None:
    def most(name: str) -> float:
        """Of any stage, in micro-batches of a whole stage."""
        chunks, ends = model_chunks(stages, name), {Kind.BACKWARD, Kind.WEIGHT_GRADIENTS}
        orders = [list(SCHEDULES[name].order(chunks, micro_batches, stage)) for stage in range(stages)]
        return max(most_held(passes, ends=ends) for passes in orders) / chunks.per_stage

    assert most(DEFAULT) == most("zero-bubble-v") == stages  # Qi et al. 2024, section 6
    assert most("dualpipe-v") == stages + 1 / 2
    # Narayanan et al. 2021, section 2.2: (p - 1) / (p v) more
    assert most(INTERLEAVED) == pytest.approx(stages * (1 + (stages - 1) / (2 * stages)), abs=0.51)
    assert most("gpipe") == micro_batches


def test_a_part_needs_a_buffer_for_each_micro_batch_that_it_holds() -> None:
    assert buffers(list(SCHEDULES["gpipe"].order(ModelChunks(2), 5, 0))) == 5
    assert buffers(list(SCHEDULES[INTERLEAVED].order(ModelChunks(2, 2), 8, 0))) == 4


def test_1f1b_computes_in_deepspeeds_order() -> None:
    kinds = {ForwardPass: Kind.FORWARD, BackwardPass: Kind.BACKWARD}
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            schedule = TrainSchedule(micro_batches, stages, stage)
            theirs = [kinds[type(c)] for commands in schedule.steps() for c in commands if type(c) in kinds]
            passes = list(one_forward_one_backward(ModelChunks(stages), micro_batches, stage))
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
        chunks = ModelChunks(stages)
        first = most_in_flight(one_forward_one_backward(chunks, micro_batches, 0))
        for stage in range(stages):
            passes = list(zero_bubble_h1(chunks, micro_batches, stage))
            assert most_in_flight(passes) == most_in_flight(one_forward_one_backward(chunks, micro_batches, stage))
            assert most_held(passes, ends={Kind.WEIGHT_GRADIENTS}) <= first


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_idle_share_is_that_of_the_formula(name: str) -> None:
    for stages, micro_batches in SIZES:
        if name in FOLDED and micro_batches < 2 * stages:
            continue
        for chunks in chunkings(name, stages):
            found = idle_share(timeline(SCHEDULES[name].order, chunks, micro_batches))
            assert found == pytest.approx(bubble(stages, micro_batches, name, chunks.per_stage))


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (1, 1.2, 0.8), (1, 2, 1), (1, 1, 0.5)])
def test_zero_bubble_waits_as_in_the_paper_for_passes_of_any_length(
    forward: float, inputs: float, weights: float
) -> None:
    # table 1 of the paper, for weight gradients that take no longer than the others
    durations = {Kind.FORWARD: forward, Kind.INPUT_GRADIENTS: inputs, Kind.WEIGHT_GRADIENTS: weights}
    for stages, micro_batches in ((2, 8), (4, 8), (8, 16)):
        waits = end_of(
            timeline(zero_bubble_h1, ModelChunks(stages), micro_batches, durations), durations
        ) - micro_batches * sum(durations.values())
        assert waits == pytest.approx((stages - 1) * (forward + inputs - weights))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_micro_batches_wanted_leave_a_fifth_idle_or_less(name: str) -> None:
    for stages in (2, 3, 8):
        wanted = micro_batches_wanted(stages, name)
        assert bubble(stages, wanted, name) <= 0.2 < bubble(stages, wanted - 1, name)
    assert micro_batches_wanted(4, "zero-bubble") == 4 < micro_batches_wanted(4, DEFAULT) == 12


def test_what_is_kept_at_most_goes_by_the_sizes_of_chunks() -> None:
    forward, inputs, weights = Kind.FORWARD, Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS
    order = [(forward, 0, 0), (forward, 0, 3), (inputs, 0, 3), (forward, 1, 0), (inputs, 0, 0), (weights, 0, 3)]
    passes = [Pass(*each) for each in order]
    assert most_kept(passes, {0: 5, 3: 2}) == 10  # two micro-batches in chunk 0, though never more than two passes
    assert most_kept(passes, {0: 2, 3: 5}) == 7
    assert most_in_flight(passes) == 2 and most_in_flight([]) == 0
