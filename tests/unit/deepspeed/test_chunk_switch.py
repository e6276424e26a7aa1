"""An engine that knows one chunk of a model goes from chunk to chunk, and finds each as it has left it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.schedule import OF_A_CHUNK, ChunkSwitch
from tests.unit.deepspeed.pipelines import pipeline

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def engine() -> PipelineEngine:
    return pipeline(ModelChunks(1, 2), 2)


def visited(switch: ChunkSwitch, engine: PipelineEngine, chunk: int | None, note: Any = None) -> dict[str, Any]:
    """Execute an instruction at a chunk, which leaves a note; return what it saw."""
    seen: dict[str, Any] = {}

    def execute(engine: PipelineEngine, buffer_id: int) -> None:
        seen.update(
            first=engine.is_first_stage(),
            last=engine.is_last_stage(),
            chunk=engine.module.chunk,
            around=(engine.prev_stage, engine.next_stage),
            note=engine.grad_layer,
            buffer=buffer_id,
            buffers=engine.num_pipe_buffers,
        )
        engine.grad_layer = note

    switch.at_chunk(execute)(engine, buffer_id=7, chunk=chunk)
    return seen


def test_each_part_is_left_as_it_was_and_found_again(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1, 2))
    switch.begin(3)
    assert visited(switch, engine, 0, "of the first")["note"] is None
    assert visited(switch, engine, 1, "of the second")["note"] is None
    assert visited(switch, engine, 0, "of the first, again")["note"] == "of the first"
    assert visited(switch, engine, 1)["note"] == "of the second"
    switch.leave()
    assert visited(switch, engine, 0)["note"] == "of the first, again"


def test_at_a_part_the_engine_takes_it_for_a_stage(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1, 2))
    assert (engine.is_first_stage(), engine.is_last_stage()) == (True, True)  # outside of a schedule it has both
    switch.begin(3)
    first, second = visited(switch, engine, 0), visited(switch, engine, 1)
    assert (first["first"], first["last"], first["chunk"], first["around"]) == (True, False, 0, (-1, 1))
    assert (second["first"], second["last"], second["chunk"], second["around"]) == (False, True, 1, (0, 2))
    assert first["buffer"] == 7 and first["buffers"] == second["buffers"] == 3
    switch.leave()
    assert (engine.is_first_stage(), engine.is_last_stage()) == (True, True)


def test_the_buffers_of_parts_are_their_own(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1, 2))
    switch.begin(2)
    found: dict[int, Any] = {}
    for chunk in (0, 1):
        switch.at_chunk(lambda engine, buffer_id, chunk=chunk: found.update({chunk: engine.pipe_buffers}))(
            engine, buffer_id=0, chunk=chunk
        )
    found[0]["outputs"][0] = "of the first"
    assert found[1]["outputs"][0] is None
    assert all(hasattr(engine, name) for name in OF_A_CHUNK)


def test_an_instruction_of_deepspeeds_schedule_is_at_no_part(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1, 2))
    switch.begin(2)
    assert visited(switch, engine, None)["first"] and visited(switch, engine, None)["last"]


def test_the_first_and_the_last_part_see_the_same_batches(engine: PipelineEngine) -> None:
    loaded = iter(range(10))
    engine._next_batch = lambda: next(loaded)
    switch = ChunkSwitch(engine, ModelChunks(1, 2))
    switch.begin(2)
    seen: dict[int, list[int]] = {0: [], 1: []}

    def load(chunk: int) -> None:
        switch.at_chunk(lambda engine, buffer_id: seen[chunk].append(engine._next_batch()))(
            engine, buffer_id=0, chunk=chunk
        )

    for chunk in (0, 0, 1, 0, 1, 1):  # the first chunk is ahead by two
        load(chunk)
    assert seen == {0: [0, 1, 2], 1: [0, 1, 2]}
    load(0)
    switch.begin(2)  # a step that failed has left a batch to the last chunk
    load(1)
    assert seen[1][-1] == 4


def test_a_part_in_the_middle_reads_no_batches() -> None:
    engine = pipeline(ModelChunks(1, 4), 1)
    switch = ChunkSwitch(engine, ModelChunks(1, 4))
    switch.begin(1)
    with pytest.raises(KeyError):
        switch.at_chunk(lambda engine, buffer_id: engine._next_batch())(engine, buffer_id=0, chunk=1)


def test_the_loss_of_a_forward_pass_is_that_of_its_backward_pass(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1))
    losses = iter([torch.tensor(1.0), torch.tensor(2.0)])
    begun: list[float] = []

    def forward(engine: PipelineEngine, buffer_id: int) -> None:
        engine.loss = next(losses)

    def backward(engine: PipelineEngine, buffer_id: int) -> None:
        begun.append(engine.loss.item())

    engine.module.train()
    for buffer in (0, 1):
        switch.keep_loss(forward)(engine, buffer_id=buffer)
    for buffer in (1, 0):
        switch.give_loss(backward)(engine, buffer_id=buffer)
    assert begun == [2.0, 1.0]
    with pytest.raises(KeyError):  # each has one
        switch.give_loss(backward)(engine, buffer_id=0)


def test_an_evaluation_keeps_no_losses(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1))
    engine.loss = torch.tensor(1.0)
    engine.module.eval()
    switch.keep_loss(lambda engine, buffer_id: None)(engine, buffer_id=0)
    with pytest.raises(KeyError):
        switch.give_loss(lambda engine, buffer_id: None)(engine, buffer_id=0)


def test_new_shapes_are_new_to_every_part(engine: PipelineEngine) -> None:
    switch = ChunkSwitch(engine, ModelChunks(1, 2))
    switch.begin(2)
    for chunk in (0, 1):
        switch.at_chunk(lambda engine, buffer_id: setattr(engine, "first_output_send", False))(
            engine, buffer_id=0, chunk=chunk
        )
    switch.leave()
    engine.reset_activation_shape()
    seen: list[bool] = []
    for chunk in (0, 1):
        switch.at_chunk(lambda engine, buffer_id: seen.append(engine.first_output_send))(
            engine, buffer_id=0, chunk=chunk
        )
    assert seen == [True, True]


def test_an_engine_with_one_part_stays_as_it_is() -> None:
    engine = pipeline(ModelChunks(1), 1)
    before = dict(vars(engine))
    switch = ChunkSwitch(engine, ModelChunks(1))
    switch.begin(1)
    switch.leave()
    assert vars(engine) == before
