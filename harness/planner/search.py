"""Rank a task's layouts by predicted speed; give the reasons against the others, and the gain from more devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from harness.config.model.plans import plan_refusal, spreads_experts
from harness.config.model.sharding import Heads
from harness.config.values.batch import bucket_elements
from harness.errors import UserError
from harness.planner.estimate import Estimate, Prediction, estimate, has_flat_sums, memory_of, require_precision
from harness.planner.hardware import GIB, HEADROOM, Hardware
from harness.planner.model_config import text_decoder
from harness.planner.shape import DecoderShape
from harness.planner.workload import DEEPSPEED, Habits, Offload, Recompute, Strategy, Workload, layer_parameters
from harness.schedules import DEFAULT, SCHEDULES, ModelChunks, PipelineSchedule
from harness.topology.layout import divisors
from harness.wording import counted

LARGEST = 10**7  # limit for any size that a user gives
SAMPLES_PER_RANK = 8  # HF's default micro-batch, if no batch is given


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training to be planned: `global_batch` samples a step on `world_size` ranks.

    Attributes:
        no_tensor: why the model cannot be cut for tensor parallelism; None if it can, or if that is unknown.
        spreads_experts: whether whole experts can be distributed over ranks.
        sequences: sequences of a sample.
    """

    hardware: Hardware
    workload: Workload
    world_size: int
    global_batch: int
    no_tensor: str | None = None
    spreads_experts: bool = False
    sequences: int = 1


def task_of(
    config: Mapping[str, object],
    source: str,
    hardware: Hardware,
    *,
    world_size: int,
    sequence: int,
    global_batch: int | None = None,
    precision: str | None = None,
    shape: DecoderShape | None = None,
    habits: Habits = DEEPSPEED,
) -> Task:
    """Return the task for the model of a config.json; `source` is its name in messages.

    By default the shape is read from the config, a rank has 8 samples, and the precision is bf16 if the device computes
    that faster than fp32.
    """
    chosen = precision or _usual_precision(hardware)
    workload = Workload(
        shape=shape or text_decoder(config, source),
        sequence=sequence,
        precision=chosen,
        gradient_bytes=2 if chosen == "fp16" or (chosen == "bf16" and not habits.sums_wide) else 4,
        on_cpu=hardware.is_host,
        habits=habits,
    )
    return Task(
        hardware=hardware,
        workload=workload,
        world_size=world_size,
        global_batch=global_batch or SAMPLES_PER_RANK * world_size,
        no_tensor=plan_refusal(config),
        spreads_experts=any(layer.experts for layer in workload.shape.layers) and spreads_experts(config),
    )


def _usual_precision(hardware: Hardware) -> str:
    return "bf16" if hardware.reached_flops("bf16") > hardware.reached_flops("fp32") else "fp32"


LARGEST_MICRO_BATCH = 128
NO_MEMORY = f"needs more memory than a device has if {HEADROOM:.0%} of it stay free"
NO_HOST_MEMORY = "needs more memory than the host has for each device"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The layouts that fit, best first; those that only lack memory; and how often each reason excluded others."""

    fitting: list[Estimate]
    too_large: list[Estimate]
    reasons: Counter[str]

    @property
    def tried(self) -> int:
        """Number of layouts that were tried."""
        return len(self.fitting) + sum(self.reasons.values())


def search(task: Task) -> Found:
    """Return all layouts of a task. Raises UserError if the device lacks the precision."""
    require_precision(task.hardware, task.workload.precision)
    fitting: list[Estimate] = []
    too_large: list[Estimate] = []
    reasons: Counter[str] = Counter()
    for candidate in candidates(task):
        if isinstance(candidate, str):
            reasons[candidate] += 1
            continue
        one = estimate(task.hardware, task.workload, candidate)
        if one.has_room:
            fitting.append(one)
            continue
        too_large.append(one)
        reasons[NO_MEMORY if one.peak_bytes > task.hardware.planned_bytes else NO_HOST_MEMORY] += 1
    fitting.sort(key=lambda one: (-one.tokens_per_second, one.peak_bytes))
    return Found(fitting=fitting, too_large=too_large, reasons=reasons)


def candidates(task: Task) -> Iterator[Strategy | str]:
    """Yield every layout that can run, and a reason for each combination of axes that cannot."""
    layer = task.workload.shape.layers[0]
    heads = Heads(query=layer.heads, key_value=layer.kv_heads) if layer.heads else None
    for pipeline in divisors(task.world_size):
        for tensor in divisors(task.world_size // pipeline):
            data = task.world_size // pipeline // tensor
            if pipeline > len(task.workload.shape.layers):
                yield "more pipeline stages than decoder layers"
            elif tensor > 1 and task.no_tensor is not None:
                yield task.no_tensor
            elif heads is not None and not heads.fit(tensor):
                yield f"tensor-parallel ranks do not fit {counted(layer.heads, 'attention head')}"
            elif task.global_batch % data and not _context_sizes(task, Strategy(tp_size=tensor, dp_size=data)):
                yield f"a global batch of {task.global_batch} is not a multiple of the data-parallel ranks"
            else:
                partition = "type:DecoderLayer" if task.workload.habits.equal_stages else "balanced"
                base = Strategy(
                    pp_size=pipeline,
                    tp_size=tensor,
                    dp_size=data,
                    split_table=True,
                    partition=partition,
                    sequences=task.sequences,
                )
                for context in _context_sizes(task, base):
                    yield from _variants(task, replace(base, cp_size=context))
                for ranks in _expert_sizes(task, tensor, data) if task.global_batch % data == 0 else ():
                    yield from _variants(task, replace(base, ep_size=ranks))


def _expert_sizes(task: Task, tensor: int, data: int) -> list[int]:
    """Return the numbers of a stage's ranks over which whole experts can be distributed equally."""
    experts = {layer.experts for layer in task.workload.shape.layers if layer.experts}
    can = bool(experts) and (task.spreads_experts or task.workload.habits.tokens_travel)
    sizes = (tensor * neighbours for neighbours in divisors(data)) if can else ()
    return [size for size in sizes if size > 1 and all(count % size == 0 for count in experts)]


LONG = 2**14  # from this many tokens on, ranks may share a sample, and parts may be computed in tiles
TILE = 2**12  # tokens; its products are as fast as larger ones
QUERIES = 2**10  # queries for which a mask is made at a time


def _context_sizes(task: Task, base: Strategy) -> list[int]:
    """Return how many data-parallel ranks may share each sequence: at most one a head."""
    if task.workload.sequence < LONG or task.workload.habits.zero_stage is not None:
        return [1] if task.global_batch % base.dp_size == 0 else []
    heads = max(1, task.workload.shape.layers[0].heads // base.tp_size)
    sizes = [size for size in divisors(base.dp_size) if size <= heads]
    return [size for size in sizes if task.global_batch % (base.dp_size // size) == 0]


def _ladder(task: Task, one: Strategy) -> Iterator[Strategy]:
    """Yield a layout as it is, and for long samples variants that need less memory a token: the loss in tiles, also
    feed-forward blocks in tiles, also activations in the host's memory."""
    yield one
    if task.workload.sequence < LONG or task.workload.habits.zero_stage is not None:
        return
    has_window = any(layer.window and layer.window < task.workload.sequence for layer in task.workload.shape.layers)
    tiled = replace(one, loss_tile=TILE, attention_tile=QUERIES if has_window else 0)
    yield tiled
    yield replace(tiled, block_tile=TILE)
    if one.recompute == "full" and not task.hardware.is_host:
        yield replace(tiled, host_activations=True)
        yield replace(tiled, host_activations=True, block_tile=TILE)


def _variants(task: Task, base: Strategy) -> Iterator[Strategy]:
    """Yield the ways to run a layout: ZeRO stage, offload, checkpointing, micro-batch and schedule."""
    samples = task.global_batch // base.batch_ranks
    recompute: tuple[Recompute, ...] = ("none", "full")
    habits = task.workload.habits
    is_ours = habits.zero_stage is None
    for stage, offload in _zero(task, base):
        flat = is_ours and has_flat_sums(task.workload, stage, offload)
        for again in recompute:
            for micro in (size for size in range(1, LARGEST_MICRO_BATCH + 1) if samples % size == 0):
                one = replace(
                    base,
                    micro_batch=micro,
                    accumulation=samples // micro,
                    zero_stage=stage,
                    offload=offload,
                    recompute=again,
                    overlap_data=stage >= 2 or flat or habits.overlap_data,
                    gathers_once=is_ours and stage == 3 and offload != "optimizer+parameters",
                    flat_sums=flat,
                    bucket=float(bucket_elements(task.workload.shape.hidden)),
                )
                if habits.reduces_layers:
                    one = replace(one, bucket=max(layer_parameters(one, x) for x in set(task.workload.shape.layers)))
                is_whole = base.ep_size == 1 or habits.shares_sequence
                for each in _ladder(task, one):
                    if not habits.shares_sequence or base.tp_size == 1:
                        yield from _orders(task, each)
                    if base.tp_size > 1 and is_whole and task.workload.sequence % base.tp_size == 0:
                        yield from _orders(task, replace(each, sequence_parallel=True))


def _orders(task: Task, one: Strategy) -> Iterator[Strategy]:
    """Yield a layout under each schedule that differs in time or memory."""
    yield one
    if one.pp_size == 1:
        return
    orders: dict[tuple[str, int], None] = {}
    for schedule in SCHEDULES.values():
        # recomputation would free the operands of deferred weight gradients
        recomputes = schedule.defers and one.recompute != "none"
        if not recomputes and not _is_1f1b_better(schedule, one.pp_size, one.accumulation):
            name = schedule.predicted_as or schedule.name
            orders |= dict.fromkeys((name, chunks) for chunks in _chunks(task, one.pp_size, schedule))
    yield from (replace(one, schedule=name, chunks=chunks) for name, chunks in orders)


@cache
def _is_1f1b_better(schedule: PipelineSchedule, stages: int, micro_batches: int) -> bool:
    """Return whether 1F1B waits no longer than a schedule of the same passes, and holds no more activations."""
    usual = SCHEDULES[DEFAULT]
    if schedule.chunks != 1 or schedule.defers:
        return False
    chunks = ModelChunks(stages)
    return usual.waits(chunks, micro_batches) <= schedule.waits(chunks, micro_batches) and all(
        usual.in_flight(chunks, micro_batches, stage) <= schedule.in_flight(chunks, micro_batches, stage)
        for stage in range(stages)
    )


def _chunks(task: Task, stages: int, schedule: PipelineSchedule) -> list[int]:
    """Return the numbers of chunks per stage to try, as `Strategy.chunks` counts them; none if layers are too few."""
    layers = len(task.workload.shape.layers)
    equal = task.workload.habits.equal_stages
    # embedding and head may each count as a layer, and fill a chunk
    each = {-(-whole // stages) for whole in (layers, layers + 2)}
    layers += 2 * equal
    if (schedule.chunks or 2) * stages > layers:
        return []
    if schedule.chunks is not None:
        return [1 if schedule.folded else schedule.chunks]
    if not equal:
        return [2]
    return sorted({count for stage in each for count in divisors(stage) if 1 < count <= layers // stages})


def _zero(task: Task, base: Strategy) -> list[tuple[int, Offload]]:
    """Return pairs (ZeRO stage, offload): 16-bit precisions need at least stage 1, and pipelines at most stage 1."""
    habits = task.workload.habits
    fixed = habits.zero_stage_of_pipeline if base.pp_size > 1 else habits.zero_stage
    if fixed is not None:
        return [(fixed, "none")]
    least = 0 if task.workload.precision == "fp32" else 1
    plain: list[tuple[int, Offload]] = [(least, "none")]
    if base.dp_size > 1 and least == 0:
        plain.append((1, "none"))
    if base.pp_size > 1:
        return plain
    divided: list[tuple[int, Offload]] = [(2, "none"), (3, "none")] if base.dp_size > 1 else []
    if base.ep_size > base.tp_size:  # ZeRO-3 would divide distributed experts twice
        return [*plain, *divided[:1]]
    if task.hardware.is_host:  # a CPU has no other memory to offload to
        return [*plain, *divided]
    return [*plain, *divided, (2, "optimizer"), (3, "optimizer"), (3, "optimizer+parameters")]


def require_fit(task: Task, found: Found) -> None:
    """Raise UserError if no layout fits."""
    if found.fitting:
        return
    least = min(found.too_large, key=lambda one: max(_shares(one)), default=None)
    if least is None:
        reason, _ = found.reasons.most_common(1)[0]
        raise UserError(f"no layout of {counted(task.world_size, 'rank')} can run: {reason}")
    on_device, on_host = _shares(least)
    free = f", and {HEADROOM:.0%} of it stay free"
    where = "on each device"
    needed = least.peak_bytes
    has = task.hardware.limit_bytes
    if on_host > on_device:
        where = "of the host for each device"
        needed = least.host_bytes
        has = task.hardware.host_memory_bytes
        free = ""
    raise UserError(
        f"no layout of {counted(task.world_size, 'rank')} fits: the smallest needs {needed / GIB:,.1f} GiB {where}, "
        f"which has {has / GIB:,.1f}{free}: use more ranks, or more memory"
    )


def _shares(one: Estimate) -> tuple[float, float]:
    """Return the memory that a layout needs on a device and on its host, as shares of theirs."""
    return one.peak_bytes / one.hardware.planned_bytes, one.host_bytes / one.hardware.host_memory_bytes


def longest(one: Estimate, room: float | None = None) -> int:
    """Return the largest number of tokens of a sample with which a layout fits, a multiple of 1,024; 0 for none.

    `room`: bytes of a device; by default those that the planner may fill.
    """
    limit = one.hardware.planned_bytes if room is None else room

    def fits(blocks: int) -> bool:
        workload = replace(one.workload, sequence=blocks * 1024)
        found = Prediction(workload=workload, strategy=one.strategy, stages=memory_of(workload, one.strategy))
        return found.peak_bytes <= limit and found.host_bytes <= one.hardware.host_memory_bytes

    least = 0
    most = 2**17
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least * 1024


@dataclass(frozen=True, kw_only=True)
class MoreDevices:
    """The best layout for the next larger number of devices that makes it faster."""

    devices: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class MoreMemory:
    """The least memory per device with which a faster layout fits."""

    gib: float
    tokens_per_second: float


def more_devices(task: Task, best: Estimate) -> MoreDevices | None:
    """Return the gain from the next usable number of devices: one or two more, one node more, or twice as many.

    None if none of them is faster, for instance because the global batch does not divide.
    """
    now = task.world_size
    size = task.hardware.node_size
    few = {now + 1, now + 2, (now // size + 1) * size} if now < 8 * size else set()
    for world_size in sorted(few | {2 * now}):
        fitting = search(replace(task, world_size=world_size)).fitting
        if fitting and fitting[0].tokens_per_second > best.tokens_per_second:
            return MoreDevices(devices=world_size, tokens_per_second=fitting[0].tokens_per_second)
    return None


def more_memory(found: Found) -> MoreMemory | None:
    """Return the least memory with which a faster layout fits; None if more memory makes nothing faster."""
    best = found.fitting[0]
    faster = [one for one in found.too_large if one.tokens_per_second > best.tokens_per_second]
    least = min((one.peak_bytes for one in faster), default=0.0)
    near = (one for one in faster if one.peak_bytes <= least * (1 + 1e-6))  # layouts may need as much as each other
    nearest = max(near, key=lambda one: one.tokens_per_second, default=None)
    if nearest is None or nearest.peak_bytes <= nearest.hardware.planned_bytes:
        return None
    missing = (nearest.peak_bytes / (1 - HEADROOM) - nearest.hardware.limit_bytes) / GIB
    return MoreMemory(gib=missing, tokens_per_second=nearest.tokens_per_second)
