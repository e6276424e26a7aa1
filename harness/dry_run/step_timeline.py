"""Predict the timeline of a whole step on one rank, from the tape of a step with at most two micro-batches.

Each micro-batch but the last takes as long as the first one: gradients are sent with the last. If new weights travel
while the next step computes, the timeline begins behind the update of the step before, and ends behind its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from harness.batches.collate import MicroBatch
from harness.config import Resolved
from harness.deepspeed.no_peers import announce_halves, cut_step
from harness.deepspeed.schedule import Observer
from harness.dry_run.stage_times import stage_times
from harness.dry_run.tape import Event, Tape, TapeSegment
from harness.dry_run.timeline import StepClock, TimelineSpan, between
from harness.parallel.pipeline.instructions import Action, instructions, make_schedule
from harness.schedules import SCHEDULES
from harness.training.engine.engine import Engine, PipelineStages
from harness.training.engine.losses import first_tensor

WEIGHTS = "weights"
"""The stream of weights that travel: they have a process group of their own."""


def predicted_step(engine: Engine, resolved: Resolved, tape: Tape, micro_batch: MicroBatch) -> list[TimelineSpan]:
    """Let an engine without peers make a step on the tape, and return the timeline of a whole step.

    Args:
        resolved: the run's config, whose schedule the engine follows from now on.
        micro_batch: token ids [sequences, tokens], and labels.
    """
    deepspeed = engine.deepspeed
    accumulation = resolved.accumulation
    is_pipeline = isinstance(engine, PipelineStages)
    if is_pipeline:
        deepspeed.schedule = make_schedule(
            deepspeed.module, resolved.schedule, resolved.chunks, deepspeed.stage_id, accumulation
        )
        deepspeed.observe(Observer(begin=lambda name, place: tape.begin(name, place.get("chunk"))))
    else:
        # a step after another micro-batch than the last updates nothing, and the next forward pass follows
        announce_halves(deepspeed, lambda name: tape.begin("ForwardPass" if name == "OptimizerStep" else name))
    batches = [micro_batch] * min(2, accumulation)
    tokens = first_tensor(micro_batch[0]).shape[1]
    weights_travel = is_pipeline and deepspeed.weights is not None and deepspeed.overlaps
    update_before: list[Event] = []
    with tape:
        for repeats in (True, False) if weights_travel else (False,):
            cut_step(deepspeed, len(batches))
            engine.train_step(batches if engine.reads_data else [], 0, tokens, settles=not weights_travel)
            if repeats:
                update_before = tape.segments[-1].events
                tape.segments = [TapeSegment("step")]
    engine.settle()
    dispatch_seconds = tape.hardware.dispatch_seconds
    if is_pipeline:
        return stage_step(tape.segments, resolved, deepspeed.stage_id, dispatch_seconds, update_before)
    return whole_step(tape.segments, accumulation, dispatch_seconds)


def whole_step(segments: Sequence[TapeSegment], accumulation: int, dispatch_seconds: float) -> list[TimelineSpan]:
    """Return the timeline of a step without pipeline stages."""
    clock = StepClock(dispatch_seconds)
    first, *again, backward, update = segments
    clock.run(first.events, 0)
    for micro_batch in range(accumulation - 1):
        for offset, segment in enumerate(again):  # a backward pass, and the next forward pass
            clock.run(segment.events, micro_batch + offset)
    clock.run(backward.events, accumulation - 1)
    clock.run(update.events)
    clock.finish()
    return clock.spans


def stage_step(
    segments: Sequence[TapeSegment],
    resolved: Resolved,
    own_stage: int,
    dispatch_seconds: float,
    update_before: Sequence[Event] = (),
) -> list[TimelineSpan]:
    """Return the timeline of a step on a pipeline stage, which waits as if all stages took as long as this one.

    Args:
        segments: of a step in which the stage follows the schedule of `resolved`.
        update_before: the update of the step before, whose weights travel into this step.
    """
    chunks, accumulation = resolved.chunks, resolved.accumulation
    programs = [
        list(instructions(SCHEDULES[resolved.schedule].order(chunks, accumulation, number), chunks.count))
        for number in range(chunks.num_stages)
    ]
    recorded = _by_instruction(segments)
    own = chunks.of_stage(own_stage)

    @cache
    def seconds(action: Action, chunk: int, of_stage: int) -> float:
        like = own[chunks.of_stage(of_stage).index(chunk)]
        events = recorded.get((action, like), [[]])[0]
        return _alone([event for event in events if event.name not in ("send", "recv")], dispatch_seconds)

    messages = [event.seconds for segment in segments for event in segment.events if event.name in ("send", "recv")]
    times = stage_times(programs, chunks, seconds, max(messages, default=0.0))
    clock = StepClock(dispatch_seconds)
    clock.run(_travelling(update_before))
    start = clock.meet()
    clock.run(segments[0].events)
    begin = clock.computed
    for instruction in programs[own_stage]:
        events = recorded.get((instruction.action, instruction.chunk), [[]])
        is_last = instruction.micro_batch == accumulation - 1
        arrival = begin + times.arrivals.get(instruction, 0.0)
        clock.run(events[-1 if is_last else 0], instruction.micro_batch, arrival=arrival)
    joined = begin + times.end if len(programs) > 1 else 0.0  # when the other stages come to the collectives
    *of_stage, update = (segment for segment in segments[1:] if segment.chunk is None)
    for segment in of_stage:
        clock.run(segment.events, arrival=joined)
    if not update_before:
        clock.run(update.events, arrival=joined)
        return between(clock.spans, start, clock.finish())
    clock.finish()
    clock.run(_travelling(update.events), arrival=joined)
    return between(clock.spans, start, clock.meet())


def _travelling(update: Sequence[Event]) -> list[Event]:
    """Return the events of an update with its all-gathers on the stream of weights."""
    return [replace(event, stream=WEIGHTS) if event.name == "all_gather" else event for event in update]


def _by_instruction(segments: Sequence[TapeSegment]) -> dict[tuple[str, int], list[list[Event]]]:
    """Return the events of each kind of instruction and chunk, a list for each micro-batch."""
    found: dict[tuple[str, int], list[list[Event]]] = {}
    for segment in segments:
        if segment.chunk is not None:
            found.setdefault((segment.instruction, segment.chunk), []).append(segment.events)
    return found


def _alone(events: Sequence[Event], dispatch_seconds: float) -> float:
    """Return the seconds of an instruction by itself."""
    clock = StepClock(dispatch_seconds)
    clock.run(events)
    return max(clock.computed, clock.host)
