"""Have a pipeline engine follow one of the schedules here."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.runtime.pipe.engine import PipelineEngine

from harness.config.values.stage_parts import StageParts
from harness.deepspeed.schedule import StageProgram, run_schedule
from harness.parallel.pipeline.schedules.instructions import buffers, instructions
from harness.parallel.pipeline.schedules.orders import ORDERS
from harness.parallel.pipeline.schedules.passes import Kind, Pass
from harness.parallel.weight_gradients import WeightGradients, attach


def follow_schedule(engine: PipelineEngine, name: str, parts: StageParts) -> None:
    """Have an engine train by the schedule of this name; DeepSpeed's own stays where there is none, or one stage."""
    if name not in ORDERS or engine.num_stages == 1:
        return
    order, stage = ORDERS[name], engine.stage_id
    passes = list(order(parts, engine.micro_batches, stage))
    gradients = WeightGradients()
    if any(each.kind is Kind.WEIGHT_GRADIENTS for each in passes):
        attach(engine.module, gradients)

    def evaluation(micro_batches: int) -> StageProgram:
        forwards = [each for each in order(parts, micro_batches, stage) if each.kind is Kind.FORWARD]
        return _program(forwards, parts, 1)

    run_schedule(engine, parts, _program(passes, parts, buffers(passes)), evaluation, gradients)


def _program(passes: Sequence[Pass], parts: StageParts, buffers_of_a_part: int) -> StageProgram:
    return StageProgram(
        instructions=[(each.action.value, each.micro_batch, each.part) for each in instructions(passes, parts.count)],
        buffers=buffers_of_a_part,
    )
