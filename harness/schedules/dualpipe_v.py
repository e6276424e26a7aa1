"""DualPipeV (DeepSeek-AI 2025, DualPipe, arXiv 2412.19437, halved by Sea AI Lab) folds the model as ZB-V does.

It overlaps a forward pass of one chunk with a backward pass of the other; here one follows the other. It defers weight
gradients only at the beginning and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.schedules.chunks import ModelChunks
from harness.schedules.folded import Passes, in_flight, waits
from harness.schedules.schedule import Pass, PipelineSchedule


def dualpipe_v(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under DualPipeV."""
    num_stages = chunks.num_stages
    count = max(2 * chunks.num_stages, micro_batches)
    after = num_stages - stage - 1
    made = Passes(chunks.of_stage(stage))
    # warm-up: forward passes, then the first backward passes of the second chunk
    made.add("0F", 2 * after)
    made.add("0F 1F", stage + 1)
    made.add("1B W 1F", after)
    # steady phase: both chunks run a forward and a backward pass in turns
    made.add("0F 1BW 1F 0BW", count - 2 * num_stages + stage + 1)
    # end: the forward passes that the second chunk lacks, then backward passes only
    made.add("1BW 1F 0BW", after)
    # Of 2 * (stage + 1) backward passes the second half defers weight gradients, so that the stage before gets its
    # input gradients sooner. With an odd number of pairs, the middle is inside a pair.
    half, odd = divmod(stage + 1, 2)
    made.add("1BW 0BW", half)
    made.add("1BW 0B" if odd else "1B 0B", 1)
    made.add("1B 0B", stage - half)
    made.add("W 0B", after)
    made.add("W", made.deferred)
    return made.of(micro_batches)


SCHEDULE = PipelineSchedule(
    name="dualpipe-v",
    paper="2412.19437",
    order=dualpipe_v,
    waits=waits,
    in_flight=in_flight,
    chunks=2,
    folded=True,
    defers=True,
    predicted_as="zero-bubble-v",
)
