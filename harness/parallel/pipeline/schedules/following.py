"""Have a pipeline engine follow one of the schedules here."""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from harness.deepspeed.schedule import StageProgram, run_schedule
from harness.parallel.pipeline.schedules.instructions import instructions, most_in_flight
from harness.parallel.pipeline.schedules.passes import ORDERS, Kind
from harness.parallel.weight_gradients import WeightGradients, attach


def follow_schedule(engine: PipelineEngine, name: str) -> None:
    """Have an engine train by the schedule of this name; DeepSpeed's own stays where there is none, or one stage."""
    if name not in ORDERS or engine.num_stages == 1:
        return
    stages, stage = engine.num_stages, engine.stage_id
    passes = list(ORDERS[name](stages, engine.micro_batches, stage))
    gradients = WeightGradients()
    if any(each.kind is Kind.WEIGHT_GRADIENTS for each in passes):
        attach(engine.module, gradients)
    program = StageProgram(
        instructions=[(each.action.value, each.micro_batch) for each in instructions(passes, stages, stage)],
        buffers=most_in_flight(passes),
    )
    run_schedule(engine, program, gradients)
