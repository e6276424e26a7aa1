"""What DeepSpeed measures and prints where its own training loop would, and the harness drives another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine

from harness.config.values.json_object import JsonObject


@contextmanager
def flops_profile(engine: DeepSpeedEngine) -> Iterator[None]:
    """Print the section `flops_profiler`'s report of a pipeline's step, which PipelineEngine starts and never ends.

    It speaks of rank 0: its stage, and its last micro-batch.
    """
    step = engine.global_steps
    yield
    if engine.flops_profiler_enabled() and step == engine.flops_profiler_profile_step() and engine.global_rank == 0:
        engine.flops_profiler.print_model_profile(
            profile_step=step,
            module_depth=engine.flops_profiler_module_depth(),
            top_modules=engine.flops_profiler_top_modules(),
            detailed=engine.flops_profiler_detailed(),
            output_file=engine.flops_profiler_output_file(),
        )
        engine.flops_profiler.end_profile()


def communication_summary(config: JsonObject) -> None:
    """Print what the section `comms_logger` has collected, on rank 0; all ranks call it."""
    if config.get("comms_logger", {}).get("enabled", False):
        deepspeed.comm.log_summary()
