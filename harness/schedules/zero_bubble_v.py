"""ZB-V (arXiv 2401.10241, section 6; Controllable Memory, arXiv 2405.15362) folds the model.

Backward passes begin at once on the first stage, which computes the loss. Weight gradients fill the waits. Every stage
holds as many activations as the first one under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.schedules.chunks import ModelChunks
from harness.schedules.folded import Passes, in_flight, waits
from harness.schedules.schedule import Pass, PipelineSchedule


def zero_bubble_v(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-V."""
    num_stages = chunks.num_stages
    count = max(2 * chunks.num_stages - 1, micro_batches)
    made = Passes(chunks.of_stage(stage))
    # Warm-up. After this many passes the first micro-batch is back at this stage, for its second chunk.
    made.add("0F", 2 * (num_stages - stage) - 1)
    made.add("1F 0F", stage)
    made.add("1F 1B W", num_stages - stage)
    # Steady phase: each forward pass is followed by a backward pass, until the first chunk has all its micro-batches.
    steady = count - made.forwards(0)
    made.add("0F 0B W 1F 1B W", steady)
    # End: the forward passes that the second chunk lacks, then backward passes only.
    made.add("0B W 1F 1B W", made.forwards(0) - made.forwards(1))
    made.add("0B 1B", stage)
    made.add("0B W", num_stages - stage)
    made.add("W", made.deferred)
    return made.of(micro_batches)


SCHEDULE = PipelineSchedule(
    name="zero-bubble-v",
    paper="2405.15362",
    order=zero_bubble_v,
    waits=waits,
    in_flight=in_flight,
    chunks=2,
    folded=True,
    defers=True,
)
