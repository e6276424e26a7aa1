"""Predict the seconds of one optimizer step, by purpose.

The first micro-batch runs through all stages, and each further one adds the time of the slowest stage (1F1B with a
flush, Narayanan et al. 2021, section 2.2): with p equal stages and m micro-batches the bubble is (p - 1) / (m + p - 1)
of the step. If traffic overlaps with computation, only the excess counts, and the slowdown that it causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from harness.config.values.step_time import left_waits
from harness.planner.hardware import Hardware
from harness.planner.layer_time import (
    COLLECTIVE_OPERATIONS,
    Seconds,
    again_in_tiles,
    context_traffic,
    embedding_seconds,
    expert_traffic,
    head_seconds,
    layer_seconds,
    layer_traffic,
    micro_batch_issue,
    tensors_of,
    update_issue,
)
from harness.planner.memory import (
    GATHERED,
    frozen_bytes,
    host_activations,
    owned_parameters,
    trained_experts,
    trained_parameters,
)
from harness.planner.traffic import all_reduce, data_group, expert_group, half_ring, message
from harness.planner.update_traffic import ADAM_BYTES, LIST_KERNEL, update_traffic
from harness.planner.workload import Stage, Strategy, Workload, stages_of
from harness.schedules import SCHEDULES

# Collectives use the device's own processors, up to 32 of 108 to 148. So a collective that is hidden behind computation
# adds this share of its time to it.
CONTENTION = 0.2


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The seconds of a step by purpose, which add up to `total`.

    `idle` is the share of the pipeline's time in which a stage waits for others, mean over the stages.
    """

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    data: float
    optimizer: float
    idle: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.bubble + self.tensor + self.pipeline + self.data + self.optimizer


def strategy_stages(workload: Workload, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the stages of a strategy."""
    return stages_of(
        workload.shape,
        strategy.pp_size,
        strategy.partition,
        workload.sequence,
        strategy.recompute == "full",
        strategy.chunks_per_stage,
        strategy.is_folded,
        strategy.boundaries,
    )


def step_seconds(hardware: Hardware, workload: Workload, strategy: Strategy) -> StepSeconds:
    """Return the seconds of a step."""
    stages = strategy_stages(workload, strategy)
    own = [_stage_compute(hardware, workload, strategy, stage) for stage in stages]
    traffic = [_stage_traffic(hardware, workload, strategy, stage) for stage in stages]
    both = [a + b for a, b in zip(own, traffic, strict=True)]
    slowest = max(range(len(stages)), key=lambda index: both[index])
    times = strategy.accumulation
    compute = times * own[slowest]
    tensor = times * traffic[slowest]
    left = left_waits(strategy.pp_size, strategy.accumulation, strategy.schedule_name, strategy.chunks)
    bubble = (sum(both) - both[slowest]) * left
    busy = times * sum(both) / len(both)
    whole = times * both[slowest] + bubble
    # With more ranks than cores, a waiting stage leaves its core to another stage. So either all cores are busy, or the
    # slowest chain of stages has enough cores.
    used = max(busy, whole / hardware.crowding) / whole
    compute = compute * used
    tensor = tensor * used
    bubble = bubble * used
    idle = 1 - busy / (whole * used)
    held = max(trained_parameters(workload, strategy, stage) for stage in stages)
    experts = max(trained_experts(workload, strategy, stage) for stage in stages)
    tensors = max(sum(count * tensors_of(layer) for layer, count in stage.layers) for stage in stages)
    return StepSeconds(
        compute=compute,
        bubble=bubble,
        tensor=tensor,
        pipeline=_pipeline(hardware, workload, strategy),
        data=_data(hardware, workload, strategy, held, experts, compute)
        + _frozen_gathers(hardware, workload, strategy, stages, compute),
        optimizer=_optimizer(hardware, workload, strategy, held, owned_parameters(strategy, held, experts), tensors)
        + update_issue(hardware, max(sum(count for _, count in stage.layers) for stage in stages)),
        idle=idle,
    )


def _stage_compute(hardware: Hardware, workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the seconds of a stage's own work on one micro-batch, forward, backward and recomputation."""
    total = Seconds(0.0, 0.0)
    forward_again = 0.0
    for layer, count in stage.layers:
        seconds = layer_seconds(hardware, workload, strategy, layer)
        total = total.plus(Seconds(count * seconds.forward, count * seconds.backward))
        if strategy.recompute == "full":
            forward_again += count * seconds.forward
        forward_again += count * again_in_tiles(hardware, workload, strategy, layer)
    if stage.is_first:
        total = total.plus(embedding_seconds(hardware, workload, strategy))
    if stage.is_last:
        head = head_seconds(hardware, workload, strategy)
        total = total.plus(head)
        forward_again += head.forward if strategy.loss_tile else 0.0
    return total.forward + total.backward + forward_again + micro_batch_issue(hardware)


def _stage_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the seconds of a stage's traffic within layers on one micro-batch."""
    total = 0.0
    for layer, count in stage.layers:
        seconds = layer_traffic(hardware, workload, strategy, layer)
        again = seconds.forward if strategy.recompute == "full" else 0.0
        passes = 3 if strategy.recompute == "full" else 2
        experts = passes * expert_traffic(hardware, workload, strategy, layer) if layer.experts else 0.0
        exchanged = passes * context_traffic(hardware, workload, strategy, layer)
        total += count * (seconds.forward + seconds.backward + again + experts + exchanged)
    return total + _host_traffic(hardware, workload, strategy, stage)


def _host_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the seconds of copying hidden states to the host and back that are not hidden behind layers."""
    moved = host_activations(workload, replace(strategy, pp_size=1), stage, 0)
    once = moved / hardware.host_bytes_per_second
    compute = sum(n * layer_seconds(hardware, workload, strategy, layer).forward for layer, n in stage.layers)
    return max(0.0, once - compute) + max(0.0, once - 3 * compute)


def _pipeline(hardware: Hardware, workload: Workload, strategy: Strategy) -> float:
    """Return the seconds of sending between stages: 2 x the hidden state of a micro-batch at each boundary.

    Each micro-batch is sent once forward and once backward, for each model chunk of a stage. If sending overlaps with
    the passes of other micro-batches, it costs its full time only while the pipeline fills and drains.
    """
    if strategy.pp_size == 1:
        return 0.0
    tokens = strategy.tokens(workload.sequence)
    state = float(tokens * workload.shape.hidden * workload.element_bytes)
    state /= strategy.tp_size if strategy.sequence_parallel else 1
    stride = strategy.tp_size * strategy.dp_size
    once = message(hardware, stride, state) + COLLECTIVE_OPERATIONS * hardware.dispatch_seconds
    is_hidden = workload.habits.overlap_interleaved and strategy.chunks > 1
    steady = strategy.accumulation * strategy.chunks_per_stage * (CONTENTION if is_hidden else 1.0)
    return 2 * once * (steady + strategy.pp_size - 1)


def _data(
    hardware: Hardware, workload: Workload, strategy: Strategy, held: float, experts: float, compute: float
) -> float:
    """Return the seconds of data-parallel traffic that are not hidden behind computation.

    ZeRO-0 and 1 reduce gradients once a step, ZeRO-2 after every micro-batch unless it is told to wait. Flat sums are
    reduced and scattered.
    ZeRO-1 and 2 gather parameters after the update, which flat sums hide behind the next forward pass; ZeRO-3 gathers
    them for every forward and every backward (Rajbhandari et al. 2020, section 7).
    """
    if data_group(hardware, strategy).size == 1:
        return 0.0
    contention = 1.0 if hardware.is_host else CONTENTION
    width = workload.element_bytes
    times = strategy.accumulation
    stage = strategy.zero_stage
    window = compute / times * 2 / 3  # gradients become final in the backward of the last micro-batch
    if strategy.chunks > 1:  # in one chunk after the other
        window *= min(times, strategy.pp_size)
    if stage == 3:
        return _zero_3(hardware, workload, strategy, held, experts, compute)
    each_micro_batch = stage == 2 and not strategy.reduces_once
    each = _reduced_bytes(workload, strategy)
    # DeepSpeed all-reduces whole buckets, although each rank needs only its part
    if not strategy.flat_sums and (stage == 0 or hardware.is_host):
        reduce = _all_reduces(hardware, strategy, held, experts, each)
    else:
        reduce = _half_rings(hardware, strategy, held, experts, each, 1)
    reduce *= times if each_micro_batch else 1
    defers = strategy.flat_sums and SCHEDULES[strategy.schedule].defers  # weight gradients come last
    hidden = 0.0
    if strategy.overlap_data and not defers:
        hidden = compute * 2 / 3 if each_micro_batch else window
    gather = _half_rings(hardware, strategy, held, experts, width, 1) if stage or strategy.flat_sums else 0.0
    # while the next forward pass computes
    travels = workload.habits.overlap_parameters or (strategy.flat_sums and strategy.overlap_data)
    shown = max(0.0, gather - window / 2) if travels else gather
    copied = _copied(hardware, workload, strategy, held * each)
    return max(0.0, reduce - hidden) + contention * min(reduce, hidden) + shown + copied


def _zero_3(
    hardware: Hardware, workload: Workload, strategy: Strategy, held: float, experts: float, compute: float
) -> float:
    """Return the seconds of ZeRO-3's traffic that are not hidden behind computation.

    Each layer is gathered while another is computed. If the backward recomputes layers, it gathers those twice that are
    too large to be kept in between. DeepSpeed copies gathered parameters (zero/partition_parameters.py,
    `AllGatherCoalescedHandle`). Gradients are not hidden: they travel in the same queue as the parameters for which the
    next layer waits (zero/stage3.py, `__avg_scatter_grads`).
    """
    width = workload.element_bytes
    times = strategy.accumulation
    layers = len(workload.shape.layers)
    gather = _half_rings(hardware, strategy, held, experts, width, layers)
    reduce = _half_rings(hardware, strategy, held, experts, _reduced_bytes(workload, strategy), layers)
    ends = 2 * gather + reduce  # of the first and the last layer
    copied = 0.0
    if workload.habits.zero_stage is None and not hardware.is_host:
        gather += 2 * held / layers * width / hardware.memory_bytes_per_second
        copied = _copied(hardware, workload, strategy, held * width)
    forwards = times
    backwards = times * (2 if strategy.recompute == "full" and held / layers > GATHERED else 1)
    if strategy.gathers_once and held <= GATHERED:  # parameters stay gathered through the step
        forwards, backwards = 1, 0
    forward = compute / (4 if strategy.recompute == "full" else 3)
    moved = layers * gather * forwards, layers * gather * backwards
    reduced = layers * reduce * times
    if workload.habits.overlap_data:
        moved = (moved[0], moved[1] + reduced)
        reduced = 0.0
    contention = 1.0 if hardware.is_host else CONTENTION
    shown = (
        max(0.0, sent - behind) + contention * min(sent, behind)
        for sent, behind in zip(moved, (forward, compute - forward), strict=True)
    )
    return sum(shown) + reduced + ends + copied


def _frozen_gathers(
    hardware: Hardware, workload: Workload, strategy: Strategy, stages: Sequence[Stage], compute: float
) -> float:
    """Return the seconds of ZeRO-3's gathering of frozen parameters that are not hidden behind computation."""
    if workload.lora is None or strategy.zero_stage < 3 or strategy.dp_size == 1:
        return 0.0
    whole = max(frozen_bytes(workload, strategy, stage) for stage in stages) * strategy.dp_size
    fits = strategy.gathers_once and whole <= GATHERED * workload.element_bytes
    moved = half_ring(data_group(hardware, strategy), whole) * (1 if fits else 2 * strategy.accumulation)
    return max(0.0, moved - compute) + (1.0 if hardware.is_host else CONTENTION) * min(moved, compute)


def _copied(hardware: Hardware, workload: Workload, strategy: Strategy, gradients: float) -> float:
    """Return the seconds in which DeepSpeed copies gradients; each copy reads and writes.

    It copies them once a step into flat buckets, and then back or to a rank's part. That counts only in a host's slow
    memory. From ZeRO-2 on it does so for every micro-batch that reduces, through one more bucket.
    """
    if not hardware.is_host and (strategy.zero_stage < 2 or workload.habits.zero_stage is not None):
        return 0.0
    part = 1 / strategy.dp_size
    if strategy.zero_stage >= 2:
        copies = (1 if strategy.reduces_once else strategy.accumulation) * (2 + part)
    elif strategy.flat_sums:
        copies = part  # the means of this rank's part
    else:
        copies = 1 + (part if strategy.zero_stage else 1)
    return 2 * copies * gradients / hardware.memory_bytes_per_second


def _half_rings(hardware: Hardware, strategy: Strategy, held: float, experts: float, each: float, layers: int) -> float:
    """Return the seconds in which one of `layers` is gathered or reduced; for experts, among fewer ranks."""
    dense = half_ring(data_group(hardware, strategy), (held - experts) * each / layers)
    return dense + (half_ring(expert_group(hardware, strategy), experts * each / layers) if experts else 0.0)


def _all_reduces(hardware: Hardware, strategy: Strategy, held: float, experts: float, each: float) -> float:
    """Return the seconds in which all gradients are all-reduced; for experts, among fewer ranks."""
    dense = all_reduce(data_group(hardware, strategy), (held - experts) * each)
    return dense + (all_reduce(expert_group(hardware, strategy), experts * each) if experts else 0.0)


def _reduced_bytes(workload: Workload, strategy: Strategy) -> float:
    """Return the bytes of one sent gradient: up to stage 1 that of the sum, above that of one micro-batch."""
    if strategy.sent_bytes is not None:
        return strategy.sent_bytes
    is_wide = strategy.zero_stage <= 1 or strategy.reduces_once or workload.habits.reduces_wide
    return workload.gradient_bytes if is_wide else workload.element_bytes


def _optimizer(
    hardware: Hardware, workload: Workload, strategy: Strategy, held: float, own: float, tensors: int
) -> float:
    """Return the seconds of the update of `tensors` parameters, bound by memory, on the device or on the host."""
    part = own if strategy.zero_stage else held
    traffic = update_traffic(workload, strategy)
    moved = part * traffic.own + held * traffic.once
    fetched = 0.0
    if strategy.offloads_parameters:
        fetched = 2 * strategy.accumulation * part * workload.element_bytes / hardware.host_bytes_per_second
    if not strategy.offloads_states:
        lists = 2 * ceil(part / LIST_KERNEL) if traffic.kernels is None else traffic.kernels
        started = (lists + traffic.kernels_once * tensors) * hardware.kernel_seconds
        return moved / hardware.memory_bytes_per_second + started + fetched
    travel = part * (workload.gradient_bytes + workload.element_bytes) / hardware.host_bytes_per_second
    return part * ADAM_BYTES / hardware.host_memory_bytes_per_second + travel + fetched
