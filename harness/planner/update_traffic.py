"""The memory traffic of summing gradients over micro-batches and of the update, by how a program does both.

Bytes are those of a parameter. `scripts/bench/account.py` counts the same in a traced step, and a test compares them.
"""

from __future__ import annotations

from harness.planner.workload import Strategy, UpdateTraffic, Workload

ADAM_BYTES = 28.0  # read master copy, two moments and gradient; write the first three
# Elements that one of CUDA's kernels for lists of tensors works on (ATen/native/cuda/MultiTensorApply.cuh)
LIST_KERNEL = 320 * 65536


def update_traffic(workload: Workload, strategy: Strategy) -> UpdateTraffic:
    """Return the traffic of a program's update."""
    habits, width, summed = workload.habits, workload.element_bytes, workload.gradient_bytes
    if habits.update is not None:
        return habits.update
    copied = 4.0 + width if width < 4 else 0.0  # float32 weights to those of the model
    if habits.zero_stage is not None or strategy.zero_stage >= 2:
        each = 2.0 * summed + (0 if habits.fused_sums else width)
        return UpdateTraffic(first=each, later=each, once=summed, own=ADAM_BYTES + width)
    clip = 8.0 if workload.on_cpu else 4.0  # a fused optimizer on a GPU writes scaled gradients back
    if strategy.flat_sums:  # the first gradient of a step is written over the sum
        return UpdateTraffic(first=width + summed, later=width + 2.0 * summed, own=summed + clip + ADAM_BYTES + copied)
    if strategy.zero_stage == 0 and width == 4:  # autograd adds gradients itself, and hands over the first one
        return UpdateTraffic(first=0.0, later=3.0 * width, once=width, own=clip + ADAM_BYTES)
    # DeepSpeed's optimizer (zero/stage_1_and_2.py): gradients are copied into a bucket and divided; those of a rank's
    # part are copied, joined and widened, widened to float64 for the norm, and clipped by a product
    norm = width + 8.0 + 8.0
    own = 2.0 * width + 2.0 * width + (width + 4.0) + norm + 8.0 + ADAM_BYTES + copied
    return UpdateTraffic(first=0.0, later=3.0 * width, once=4.0 * width, own=own, kernels_once=4)
