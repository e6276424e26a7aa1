"""The time of a pipeline's step, from the times of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from harness.schedules import DEFAULT, model_chunks, named


def left_waits(num_stages: int, micro_batches: int, schedule: str, chunks_per_stage: int | None = None) -> float:
    """Return a schedule's idle time as a fraction of 1F1B's; 1 for a single stage, which never idles."""
    if num_stages == 1:
        return 1.0
    chunks = model_chunks(num_stages, schedule, chunks_per_stage)
    return named(schedule).waits(chunks, micro_batches) / (3 * chunks.per_stage * (num_stages - 1))


def pipeline_seconds(
    stages: Sequence[float], micro_batches: int, schedule: str = DEFAULT, chunks_per_stage: int | None = None
) -> float:
    """Return the predicted seconds of a step's passes: the first micro-batch crosses every stage, and each further one
    takes as long as the slowest stage.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    section 2.2.1, extended to stages of unequal time. Schedules other than 1F1B have only a fraction of the idle time.

    Args:
        stages: seconds of a forward and backward of one micro-batch, by stage.
    """
    waits = (sum(stages) - max(stages)) * left_waits(len(stages), micro_batches, schedule, chunks_per_stage)
    return micro_batches * max(stages) + waits
