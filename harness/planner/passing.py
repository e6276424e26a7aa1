"""Bytes that come and go within a step, beside parameters, summed gradients and optimizer states.

A step is fullest at one of four moments: where a backward begins (all activations stand), where it reaches its last
layer (all other gradients stand), where gradients are reduced, and where the optimizer steps on a flat copy of them.
Each is counted from what DeepSpeed 0.19.8 allocates: runtime/engine.py (`allreduce_bucket`), zero/stage_1_and_2.py
(`copy_grads_in_partition`, `get_flat_partition`, `step`), zero/stage3.py (`_prepare_fp32_grad_for_sub_group`),
zero/partitioned_param_coordinator.py (`__params_to_release`).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.planner.shape import LayerShape
from harness.planner.stages import Stage
from harness.planner.workload import Strategy, Workload

FLAT_BUCKET = 5e8  # gradients, DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
GATHERED = 5e8  # parameters at the end of a forward: their way through the backward is within stage3_max_reuse_distance
SUB_GROUP = 1e9  # elements that ZeRO-3 steps on at once, DeepSpeed's sub_group_size
SHARED_PIECE = 2**22  # bytes; twice that of each rank of a host is mapped (harness/parallel/collectives/host_memory.py)


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What a rank of a stage holds when a step begins to pass through it.

    Attributes:
        parameters: elements before ZeRO shares them out; own: those that it leaves to this rank.
        gradients: bytes of their sums on the device.
        made: bytes of activations and logits.
        layer: bytes of the first layer's activations; below: elements of its parameters and of those before it.
        in_flight: micro-batches that are in flight at most.
    """

    parameters: float
    own: float
    gradients: float
    made: float
    layer: float
    below: float
    in_flight: float


def passing_bytes(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes at the fullest moment, activations and logits among them."""
    at_last_layer = _at_last_layer(workload, strategy, load)
    at_reduction = _at_reduction(workload, strategy, stage, load)
    at_backward = _at_backward(workload, strategy, stage, load)
    return max(at_backward, at_last_layer, at_reduction, _at_update(workload, strategy, load))


def shared_bytes(workload: Workload, strategy: Strategy, held: float, state: float) -> float:
    """Return the bytes of memory that ranks of one host share and that count as this rank's, where it reads them."""
    if not workload.on_cpu:
        return 0.0
    of_data = 2 * strategy.dp_size * min(SHARED_PIECE, held * workload.element_bytes) if strategy.dp_size > 1 else 0.0
    return of_data + (2 * strategy.tp_size * min(SHARED_PIECE, state) if strategy.tp_size > 1 else 0.0)


def _at_backward(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes where a backward begins, which makes the gradient of the largest matrix beside what it needs.

    The gradients of the first backward are not there yet, but where they have a flat tensor of their own: a stage that
    has fewer micro-batches in flight than the step has begins the others with whole sums. ZeRO-2 copies its part of
    each micro-batch's into one more flat tensor; on a CPU the system hands out the pages of that as they are filled.
    """
    width, zero = workload.element_bytes, strategy.zero_stage
    again = strategy.accumulation > load.in_flight
    largest = largest_matrix(workload, strategy, stage) * width
    if workload.habits.sums_in_place:
        return load.made + _buckets(workload, strategy, load)
    if zero == 3:
        whole = load.made + _gathered(workload, strategy, stage, load) + largest
        if workload.on_cpu and strategy.bucket >= load.parameters:  # filled at the end of the backward alone
            return whole
        return whole + _buckets(workload, strategy, load)
    if zero == 2:
        begun = load.made + 2 * largest
        if workload.on_cpu:  # whose buckets, made anew for each backward, take memory as they are filled
            return begun - (0.0 if again or _sums_apart(workload) else load.gradients)
        whole = begun + _buckets(workload, strategy, load)
        return whole + (load.gradients if again and not _sums_apart(workload) else 0.0)
    is_there = again or strategy.whole_gradients or (zero == 0 and width == 2)
    return load.made + largest - (0.0 if is_there else load.gradients)


def _at_last_layer(workload: Workload, strategy: Strategy, load: StageLoad) -> float:
    """Return the bytes where a backward reaches the first layer: its activations, kept or computed again.

    In the step's first backward the gradients of that layer, and of what lies before it, are not there yet.
    """
    again = strategy.accumulation > load.in_flight or strategy.whole_gradients or workload.habits.sums_in_place
    if strategy.zero_stage >= 2:
        return 0.0  # gradients go to their part as they are made, so that the begin of the backward is fuller
    return load.layer - (0.0 if again else load.below * workload.element_bytes)


def _at_reduction(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes at the end of the last backward.

    Without ZeRO, and for bf16 at stage 1, gradients are copied into flat buckets; not in fp32 on a rank that sends none
    (harness/deepspeed/gradient_reduction.py). ZeRO-1 and ZeRO-2 copy this rank's part into one flat tensor, and
    matrices that exceed a bucket one by one. ZeRO-3's parameters stay gathered between the micro-batches of a step.
    """
    width, zero = workload.element_bytes, strategy.zero_stage
    if workload.habits.sums_in_place:
        return 0.0
    if zero == 3:
        stay = strategy.accumulation > 1 and strategy.gathers_once and load.parameters <= GATHERED
        return _buckets(workload, strategy, load) + (_gathered(workload, strategy, stage, load) if stay else 0.0)
    if zero == 0 or strategy.whole_gradients:
        alone = strategy.dp_size == 1 and zero == 0 and width == 4
        return 0.0 if alone else min(load.parameters, FLAT_BUCKET) * max(width, workload.gradient_bytes)
    moved = largest_matrix(workload, strategy, stage) * width + _buckets(workload, strategy, load)
    if zero == 1:  # a CPU's bucket takes memory as it is filled, and each gradient in it leaves as much
        return (0.0 if workload.on_cpu else moved) + load.own * width
    again = strategy.accumulation > load.in_flight and not _sums_apart(workload)
    return moved + (load.gradients if again else 0.0)


def _at_update(workload: Workload, strategy: Strategy, load: StageLoad) -> float:
    """Return the bytes of the flat copy of a rank's gradients that the optimizer steps on, in fp32.

    ZeRO-1 and ZeRO-2 make it of the parts that they have put aside, and at stage 1 other ranks' parts are gone by then;
    ZeRO-2 with sums in fp32 of 16-bit gradients has it already. ZeRO-3 makes it for a sub-group at a time. In fp16 the
    flat copy is there twice for a moment, as it was and in fp32.
    """
    width, zero = workload.element_bytes, strategy.zero_stage
    if workload.habits.sums_in_place or strategy.offload != "none" or zero == 0 or strategy.whole_gradients:
        return 0.0
    part = load.own
    if zero == 3:
        summed = max(workload.gradient_bytes, width)
        return min(part, SUB_GROUP) * (summed if summed == 4 else summed + 4)
    if zero == 2 and _sums_apart(workload):
        return 0.0
    copied = part * (width if width == 4 else width + 4)
    return copied + (part * width - load.gradients if zero == 1 else 0.0)


def _sums_apart(workload: Workload) -> bool:
    """Whether gradients are summed in a wider dtype than their own (`_use_compact_grad_partition_buffer`)."""
    return workload.gradient_bytes > workload.element_bytes


def _buckets(workload: Workload, strategy: Strategy, load: StageLoad) -> float:
    """Return the bytes of ZeRO's buckets: one fills while the other is reduced.

    DeepSpeed allocates each whole, however few the parameters are: a second one where gradients travel while layers
    compute, and under a pipeline (zero/stage_1_and_2.py, `setup_buckets`, `reduce_gradients`). ZeRO-3 has one, and
    makes the second of what is in it. A CPU's take memory as they are filled. There ZeRO-3 has none, but gradients
    stand until as many are there, and beside them their means.
    """
    ranks = strategy.dp_size
    if strategy.zero_stage == 0 or strategy.whole_gradients:
        return 0.0
    filled = min(strategy.bucket, load.parameters)
    if workload.on_cpu or workload.habits.sums_in_place:
        if strategy.dp_size == 1:
            return 0.0
        return (1 + 1 / ranks if workload.on_cpu and strategy.zero_stage == 3 else 2) * filled * workload.element_bytes
    if strategy.zero_stage == 3:
        return (strategy.bucket + filled) * workload.element_bytes
    is_double = strategy.overlap_data or strategy.pp_size > 1
    return (strategy.bucket + (strategy.bucket if is_double else filled)) * workload.element_bytes


def _gathered(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes of gathered parameters: what the forward has gathered, as far as it is needed again soon."""
    if strategy.dp_size == 1:
        return 0.0
    layer = max((_matrix(strategy, layer) for layer, _ in stage.layers), default=0.0)
    return max(min(load.parameters, GATHERED), 2 * layer) * workload.element_bytes


def largest_matrix(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the elements of a rank's largest parameter, whose gradient is made at once."""
    shape = workload.shape
    table = shape.vocab * shape.hidden / strategy.tp_size if stage.is_first or stage.is_last else 0.0
    return max([table, *[_matrix(strategy, layer) for layer, _ in stage.layers]])


def _matrix(strategy: Strategy, layer: LayerShape) -> float:
    """Return the elements of the largest matrix of a layer; those of all experts lie in one tensor."""
    dense = layer.hidden * max(layer.query, layer.output, layer.dense_ffn) / strategy.tp_size
    experts = layer.experts * layer.into_ffn * layer.hidden * layer.expert_ffn / max(strategy.ep_size, strategy.tp_size)
    return max(dense, experts)
