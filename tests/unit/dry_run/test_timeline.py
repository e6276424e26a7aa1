"""Timelines worked by hand: what overlaps, what waits, and how long a step of equal pipeline stages takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.checking import resolve
from harness.config import AutoValues
from harness.config.values.batch import bubble
from harness.dry_run.stage_times import stage_times
from harness.dry_run.step_timeline import stage_step, whole_step
from harness.dry_run.tape import COMPUTE, Event, Tape, TapeSegment
from harness.dry_run.timeline import StepClock, TimelineSpan, as_trace
from harness.parallel.pipeline.instructions import Action, instructions
from harness.schedules import SCHEDULES, model_chunks
from harness.topology.layout import Layout
from tests.unit.planner.devices import device


def kernel(seconds: float = 1.0, waits: tuple[int, ...] = (), part: str = "forward") -> Event:
    return Event(number=-1, name="mm", stream=COMPUTE, part=part, seconds=seconds, waits=waits)


def sent(number: int, seconds: float, *, blocks: bool = False, name: str = "all_reduce", to: str = "data") -> Event:
    return Event(number=number, name=name, stream=to, part="communication", seconds=seconds, blocks=blocks)


ITEM = Event(number=-1, name="item", stream=COMPUTE, part="forward", seconds=0.0, blocks=True)


def spans_of(*events: Event, dispatch: float = 0.0, arrival: float = 0.0) -> list[tuple[str, str, float, float]]:
    clock = StepClock(dispatch)
    clock.run(events, arrival=arrival)
    clock.finish()
    return [(span.stream, span.name, span.start, span.end) for span in clock.spans]


def test_a_kernel_runs_beside_a_message_until_it_uses_the_result() -> None:
    assert spans_of(kernel(), sent(7, 5.0), kernel(), kernel(waits=(7,))) == [
        (COMPUTE, "mm", 0, 1),
        ("data", "all_reduce", 1, 6),
        (COMPUTE, "mm", 1, 2),
        (COMPUTE, "wait for all_reduce (data)", 2, 6),
        (COMPUTE, "mm", 6, 7),
    ]


def test_messages_of_one_group_follow_each_other_and_the_step_ends_with_the_last() -> None:
    ends = [end for *_, end in spans_of(kernel(), sent(0, 5.0), sent(1, 5.0), sent(2, 1.0, to="tensor"), kernel())]
    assert ends == [1, 6, 11, 2, 2, 6, 11]


def test_a_program_that_waits_at_once_computes_nothing_meanwhile() -> None:
    assert spans_of(sent(0, 5.0, blocks=True), kernel())[1:] == [
        (COMPUTE, "wait for all_reduce (data)", 0, 5),
        (COMPUTE, "mm", 5, 6),
    ]


def test_a_slow_host_is_waited_for_and_jumps_to_the_end_of_what_it_waits_for() -> None:
    assert spans_of(kernel(), kernel(), dispatch=3.0) == [
        (COMPUTE, "mm", 0, 1),
        (COMPUTE, "wait for the host", 1, 3),
        (COMPUTE, "mm", 3, 4),
        (COMPUTE, "wait for the host", 4, 6),
    ]
    assert spans_of(kernel(10.0), ITEM, kernel(), dispatch=3.0)[1] == (COMPUTE, "mm", 10, 11)


def test_what_comes_from_another_stage_is_there_when_it_has_arrived() -> None:
    recv = sent(0, 2.0, name="recv", to="pipeline")
    assert spans_of(recv, kernel(waits=(0,)), arrival=9.0) == [
        ("pipeline", "recv", 7, 9),
        (COMPUTE, "wait for recv (pipeline)", 0, 9),
        (COMPUTE, "mm", 9, 10),
    ]


def test_each_micro_batch_but_the_last_repeats_the_first() -> None:
    names = "step", "BackwardPass", "ForwardPass", "LastBackward", "LastStep"
    segments = [TapeSegment(name, events=[kernel(10.0**place)]) for place, name in enumerate(names)]
    spans = whole_step(segments, 4, 0.0)
    assert [span.end - span.start for span in spans] == [1, 10, 100, 10, 100, 10, 100, 1000, 10000]
    assert [span.micro_batch for span in spans] == [0, 0, 1, 1, 2, 2, 3, 3, None]


def test_weights_on_their_way_are_waited_for_by_the_passes_that_use_them_and_not_at_the_end() -> None:
    update = TapeSegment("OptimizerStep", events=[kernel(1.0, part="optimizer"), sent(0, 4.0, name="all_gather")])
    segments = [
        TapeSegment("step", events=[kernel(1.0)]),
        TapeSegment("ForwardPass", 0, [kernel(1.0), kernel(1.0, waits=(0,))]),
        TapeSegment("BackwardPass", 0, [kernel(5.0)]),
        update,
    ]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    resolved = resolve(config, AutoValues())
    travelling = stage_step(segments, resolved, 0, 0.0, update.events)
    assert [(span.stream, span.start, span.end) for span in travelling] == [
        ("weights", 0, 4),
        (COMPUTE, 0, 1),
        (COMPUTE, 1, 2),
        (COMPUTE, 2, 4),  # waits
        (COMPUTE, 4, 5),
        (COMPUTE, 5, 10),
        (COMPUTE, 10, 11),  # the update; the weights leave when the step ends
    ]
    assert stage_step(segments, resolved, 0, 0.0)[-1].end == 1 + 2 + 5 + 1 + 4  # with the weights in the end


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved", "zero-bubble-v"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_equal_stages_wait_as_long_as_the_formula_says(schedule: str, stages: int, micro_batches: int) -> None:
    chunks = model_chunks(stages, schedule)
    programs = [
        list(instructions(SCHEDULES[schedule].order(chunks, micro_batches, stage), chunks.count))
        for stage in range(stages)
    ]
    seconds = {Action.FORWARD: 1.0, Action.BACKWARD: 2.0, Action.INPUT_GRADIENTS: 1.0, Action.WEIGHT_GRADIENTS: 1.0}
    times = stage_times(programs, chunks, lambda action, *_: seconds.get(action, 0.0), 0.0)
    own = 3 * micro_batches * chunks.per_stage
    assert 1 - own / times.end == pytest.approx(bubble(stages, micro_batches, schedule))


def test_messages_between_stages_take_their_time() -> None:
    chunks = model_chunks(2, "1f1b")
    programs = [list(instructions(SCHEDULES["1f1b"].order(chunks, 1, stage), 2)) for stage in range(2)]
    times = stage_times(programs, chunks, lambda action, *_: float(action is Action.FORWARD), 10.0)
    assert sorted(times.arrivals.values()) == [1 + 10, 1 + 10 + 1 + 10]


def test_a_trace_has_a_process_for_each_rank_and_a_thread_for_each_stream() -> None:
    spans = [
        TimelineSpan(name="mm", stream=COMPUTE, part="forward", start=0.0, end=1e-6, micro_batch=3),
        TimelineSpan(name="all_reduce", stream="data", part="communication", start=1e-6, end=3e-6),
        TimelineSpan(name="mul", stream=COMPUTE, part="optimizer", start=1e-6, end=2e-6),
    ]
    events = as_trace({5: spans})["traceEvents"]
    assert isinstance(events, list)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {0: "passes", 1: "compute", 2: "data"}
    assert {event["pid"] for event in events} == {5}
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in complete] == [
        (0, "forward 3", "forward", 0, 1),
        (0, "optimizer", "optimizer", 1, 1),
        (1, "mm", "forward", 0, 1),
        (2, "all_reduce", "communication", 1, 2),
        (1, "mul", "optimizer", 1, 1),
    ]


def test_rounded_spans_of_a_stream_still_follow_each_other() -> None:
    times = [0.6e-9 * place for place in range(5)]
    spans = [
        TimelineSpan(name="mm", stream=COMPUTE, part="forward", start=start, end=end) for start, end in pairwise(times)
    ]
    events = as_trace({0: spans})["traceEvents"]
    assert isinstance(events, list)
    computed = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    for before, after in pairwise(computed):
        assert round(1e3 * (before["ts"] + before["dur"])) == round(1e3 * after["ts"])  # nanoseconds


def test_a_tape_notes_kernels_messages_and_which_kernel_uses_what_arrives() -> None:
    layout = Layout(pp_size=1, tp_size=1, dp_size=2)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with Tape(device(memory_bytes_per_second=1.0), layout, 0) as tape:
            x = torch.ones(2, requires_grad=True)
            summed = torch.ones(3)
            work = torch.distributed.all_reduce(summed, async_op=True)
            y = (2 * x).sum()
            tape.begin("BackwardPass")
            y.backward()
            work.wait()
            tape.begin("OptimizerStep")
            summed.mul_(2)
            torch.distributed.all_reduce(summed)
            y.item()
    finally:
        torch.distributed.destroy_process_group()
    events = [event for segment in tape.segments for event in segment.events]
    assert all(before.number < after.number for before, after in pairwise(events))
    (early, late) = (event for event in events if event.name == "all_reduce")
    assert (early.stream, early.blocks, late.blocks) == ("data", False, True)
    used = [event for event in events if early.number in event.waits]
    assert [event.name for event in used] == ["mul_"]
    parts = [(segment.instruction, {event.part for event in segment.events}) for segment in tape.segments]
    assert parts[0] == ("step", {"forward", "communication"})
    assert parts[1] == ("BackwardPass", {"backward"})
    assert parts[2] == ("OptimizerStep", {"optimizer", "communication"})
    assert events[-1].is_host_wait
