"""Have a pipeline engine follow one of the schedules here."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.runtime.pipe.engine import PipelineEngine

from harness.config.values.layout_keys import DEEPSPEED_1F1B
from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.schedule import StageProgram, run_schedule
from harness.parallel.pipeline.schedules.instructions import buffers, instructions
from harness.parallel.pipeline.schedules.orders import ORDERS
from harness.parallel.pipeline.schedules.passes import Kind, Pass
from harness.parallel.weight_gradients import WeightGradients, attach


def follow_schedule(engine: PipelineEngine, name: str, chunks: ModelChunks) -> None:
    """Have an engine train by the schedule of this name. DeepSpeed's own 1F1B, and an engine of one stage, stay as they
    are."""
    if name == DEEPSPEED_1F1B or engine.num_stages == 1:
        return
    order, stage = ORDERS[name], engine.stage_id
    passes = list(order(chunks, engine.micro_batches, stage))
    gradients = WeightGradients()
    if any(each.kind is Kind.WEIGHT_GRADIENTS for each in passes):
        attach(engine.module, gradients)

    def evaluation(micro_batches: int) -> StageProgram:
        forwards = [each for each in order(chunks, micro_batches, stage) if each.kind is Kind.FORWARD]
        return _program(forwards, chunks, 1)

    run_schedule(engine, chunks, _program(passes, chunks, buffers(passes)), evaluation, gradients)


def _program(passes: Sequence[Pass], chunks: ModelChunks, buffers_of_a_chunk: int) -> StageProgram:
    return StageProgram(
        instructions=[(each.action.value, each.micro_batch, each.chunk) for each in instructions(passes, chunks.count)],
        buffers=buffers_of_a_chunk,
    )
