"""An engine that knows one chunk of a model goes from chunk to chunk, and finds each as it has left it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.deepspeed.schedule import OF_A_CHUNK, Observer, Schedule, ScheduledEngine, StageProgram
from harness.parallel.weight_gradients import DeferredGradients
from harness.schedules import ModelChunks
from tests.unit.deepspeed.pipelines import batches, built, config_of, staged

pytestmark = pytest.mark.usefixtures("one_rank")


def engine_of(chunks: int, *steps: tuple[str, int, int]) -> ScheduledEngine:
    """An engine whose step is a list of instructions, each with a micro-batch and a chunk."""
    program = StageProgram(instructions=steps, buffers=3)
    schedule = Schedule(
        chunks=ModelChunks(1, chunks),
        training=lambda _: program,
        evaluation=lambda _: program,
        deferred=DeferredGradients(),
        defers=False,
    )
    return built(staged(schedule.chunks), schedule, config_of(2))


def seen_in(engine: ScheduledEngine, notes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What each loading finds in an evaluation; each leaves a note in an attribute of its chunk."""
    seen: list[dict[str, Any]] = []
    left = iter(notes)

    def look(name: str, _place: object) -> None:
        if name == "LoadMicroBatch":
            seen.append(
                {
                    "ends": (engine.is_first_stage(), engine.is_last_stage()),
                    "chunk": engine.module.chunk,
                    "around": (engine.prev_stage, engine.next_stage),
                    "note": engine.grad_layer,
                    "buffers": engine.num_pipe_buffers,
                }
            )
            engine.grad_layer = next(left, None)

    stop = engine.observe(Observer(begin=lambda *_: None, end=look))
    engine.set_dataiterator(batches(0))
    engine._exec_schedule(engine._inference_schedule(2))
    stop()
    return seen


LOADS = [("LoadMicroBatch", 0, 0), ("LoadMicroBatch", 0, 1), ("LoadMicroBatch", 1, 0), ("LoadMicroBatch", 1, 1)]


def test_each_chunk_is_left_as_it_was_and_found_again() -> None:
    found = seen_in(engine_of(2, *LOADS), ["of the first", "of the second", "again"])
    assert [each["note"] for each in found] == [None, None, "of the first", "of the second"]


def test_at_a_chunk_the_engine_takes_it_for_a_stage() -> None:
    engine = engine_of(2, *LOADS)
    assert (engine.is_first_stage(), engine.is_last_stage()) == (True, True)  # outside of a schedule it has both
    first, second, *_ = seen_in(engine)
    assert (first["ends"], first["chunk"], first["around"]) == ((True, False), 0, (-1, 1))
    assert (second["ends"], second["chunk"], second["around"]) == ((False, True), 1, (0, 2))
    assert first["buffers"] == second["buffers"] == 3
    assert (engine.is_first_stage(), engine.is_last_stage()) == (True, True)


def test_the_first_and_the_last_chunk_see_the_same_batches() -> None:
    engine = engine_of(2, ("LoadMicroBatch", 0, 0), ("LoadMicroBatch", 1, 0), *LOADS[1::2])
    seen_in(engine)
    first, last = (engine._chunk_state[chunk]["pipe_buffers"] for chunk in (0, 1))
    for number, (inputs, labels) in zip(range(2), batches(0), strict=False):
        assert first["inputs"][number].equal(inputs) and last["labels"][number].equal(labels)
    assert first["labels"] == [None] * 3
    seen_in(engine)  # what the step before has left unread is gone
    assert engine._chunk_state[0]["pipe_buffers"]["inputs"][0].equal(next(batches(0))[0])


def test_new_shapes_are_new_to_every_chunk() -> None:
    engine = engine_of(2, *LOADS)
    seen_in(engine)
    for state in engine._chunk_state.values():
        state["first_output_send"] = False
    engine.reset_activation_shape()
    assert [state["first_output_send"] for state in engine._chunk_state.values()] == [True, True]
    assert all(set(state) == set(OF_A_CHUNK) for state in engine._chunk_state.values())


def test_an_engine_with_one_chunk_keeps_no_second_state() -> None:
    engine = engine_of(1, ("LoadMicroBatch", 0, 0))
    assert seen_in(engine)[0]["around"] == (-1, 1) and engine._chunk_state == {}
