"""The prediction of a layout: `estimate`, `plan`, the start of a run and its report all show this record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from harness.config.resolving.resolved import Resolved
from harness.config.values.gradient_sums import sums_flat
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup, whole
from harness.errors import UserError
from harness.optimizers import DEFAULT, find
from harness.planner.hardware import GIB, Hardware
from harness.planner.lora import Lora
from harness.planner.memory import StageMemory, stage_memory
from harness.planner.shape import DecoderShape
from harness.planner.step import StepSeconds, step_seconds, strategy_stages
from harness.planner.workload import ELEMENT_BYTES, Offload, Strategy, Workload
from harness.schedules import SCHEDULES

MASTER_IN_BF16, STATES_IN_BF16 = "bf16/bf16_master_weights_and_grads", "bf16/bf16_optimizer_states"
MASTER_IN_FP16 = "fp16/fp16_master_weights_and_grads"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted memory of a layout.

    Attributes:
        stages: memory of a rank of each pipeline stage.
        limit_bytes: memory of a rank's device, or its share of the host's; None if no device is known.
    """

    workload: Workload
    strategy: Strategy
    stages: tuple[StageMemory, ...]
    limit_bytes: float | None = None

    @property
    def peak_bytes(self) -> float:
        """Device memory of the stage that needs most."""
        return max(stage.total for stage in self.stages)

    @property
    def host_bytes(self) -> float:
        """Host memory of a rank of the stage that needs most."""
        return max(stage.host for stage in self.stages)

    def for_boundaries(self, boundaries: Sequence[int]) -> Self:
        """Return the prediction for the boundaries of the model chunks that a run has chosen.

        If the model has another number of pipeline layers than the planner counts, the prediction stays as it is.
        """
        if boundaries[-1] != len(self.workload.shape.layers) + 2:
            return self
        return self._of(replace(self.strategy, boundaries=tuple(boundaries)))

    def _of(self, strategy: Strategy) -> Self:
        return replace(self, strategy=strategy, stages=memory_of(self.workload, strategy))

    def memory_gib(self) -> JsonObject:
        """Return the memory of each stage by purpose, as JSON; programs rely on its keys."""
        parts = [field.name for field in fields(StageMemory) if field.name != "host"]
        return {
            "limit": None if self.limit_bytes is None else self.limit_bytes / GIB,
            "max": self.peak_bytes / GIB,
            "stages": [
                {part: getattr(stage, part) / GIB for part in parts} | {"total": stage.total / GIB}
                for stage in self.stages
            ],
        }

    def as_json(self) -> JsonObject:
        """Return the JSON for run.json."""
        memory = self.memory_gib()
        for shown, stage in zip(memory["stages"], self.stages, strict=True):
            shown["states"] = stage.states / GIB
        return {"sequence_length": self.workload.sequence, "memory_gib": memory, "estimate": None}

    def __str__(self) -> str:
        sizes = sorted(stage.total / GIB for stage in self.stages)
        between = f"{sizes[0]:.2f} to {sizes[-1]:.2f}" if len(sizes) > 1 else f"{sizes[0]:.2f}"
        # on a CPU the interpreter and its libraries use the same memory as the tensors, but are not predicted
        beside = " beside the process itself" if self.workload.on_cpu else ""
        limit = "" if self.limit_bytes is None else f", of {self.limit_bytes / GIB:.1f}"
        return f"expected memory: {between} GiB a rank{beside}{limit}"


@dataclass(frozen=True, kw_only=True)
class Estimate(Prediction):
    """A prediction for a device of known speed, which includes the seconds of a step."""

    hardware: Hardware
    seconds: StepSeconds

    @property
    def fits(self) -> bool:
        """Whether every stage fits on its device, and the offloaded tensors in the host's memory."""
        return self.peak_bytes <= self.hardware.limit_bytes and self.host_bytes <= self.hardware.host_memory_bytes

    @property
    def has_room(self) -> bool:
        """Whether it fits with a margin for the prediction's error; only then is it recommended."""
        return self.peak_bytes <= self.hardware.planned_bytes and self.host_bytes <= self.hardware.host_memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        sequences = self.strategy.global_batch * self.strategy.sequences
        return sequences * self.workload.sequence / self.seconds.total

    @property
    def forward_seconds(self) -> float:
        """Seconds of a pass without gradients over the samples of a step, about: a third of the computation, or a
        quarter if activations are recomputed."""
        computed = self.seconds.compute + self.seconds.bubble + self.seconds.tensor + self.seconds.pipeline
        return computed / (4 if self.strategy.recompute == "full" else 3)

    def _of(self, strategy: Strategy) -> Self:
        return replace(super()._of(strategy), seconds=step_seconds(self.hardware, self.workload, strategy))

    def as_json(self) -> JsonObject:
        """Return the JSON for run.json, with the seconds of a step."""
        return {**super().as_json(), "estimate": self.row()}

    def __str__(self) -> str:
        speed = f"{self.seconds.total:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s ({self.hardware.name})"
        return f"{super().__str__()}; {speed}"

    def row(self) -> JsonObject:
        """Return the row as JSON; programs rely on its keys, which docs/planning.md lists."""
        ranks = self.strategy.world_size
        strategy = self.strategy
        rate = self.tokens_per_second / ranks
        frozen = self.workload.lora is not None
        model_flops = rate * self.workload.shape.flops_per_token(self.workload.sequence, frozen=frozen)
        seconds = {key: value for key, value in asdict(self.seconds).items() if key != "idle"}
        return {
            "layout": {"pipeline": strategy.pp_size, "tensor": strategy.tp_size, "data": strategy.dp_size},
            "zero_stage": strategy.zero_stage,
            "micro_batch": strategy.micro_batch,
            "gradient_accumulation_steps": strategy.accumulation,
            "activation_checkpointing": strategy.recompute == "full",
            "offload": strategy.offload,
            "memory_gib": self.memory_gib(),
            "step_seconds": {**seconds, "total": self.seconds.total},
            "bubble_fraction": self.seconds.idle,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": rate,
            "model_tflops_per_gpu": model_flops / 1e12,
            "mfu": model_flops / self.hardware.flops[self.workload.precision],
            "schedule": strategy.schedule_name,
            "expert_parallel_size": strategy.ep_size,
            "chunks_per_stage": strategy.chunks_per_stage,
            "sequence_parallel": strategy.sequence_parallel,
            "context_parallel_size": strategy.cp_size,
            "activations_on_host": strategy.host_activations,
            "tiling": {"loss": strategy.loss_tile, "feed_forward": strategy.block_tile},
        }


def predict(
    resolved: Resolved,
    shape: DecoderShape,
    sequence: int,
    *,
    hardware: Hardware | None = None,
    on_cpu: bool = False,
    boundaries: tuple[int, ...] | None = None,
    fused_kernels: bool = True,
    sequences: int = 1,
    fp8: bool = False,
    lora: Lora | None = None,
) -> Prediction:
    """Predict a resolved config: memory only, or with `hardware` an `Estimate` with the seconds of a step too.

    Args:
        sequence: tokens of a sample.
        on_cpu: whether ranks are processes on a CPU; not needed with `hardware`.
        boundaries: boundaries of the model chunks, if the run has chosen them; by default those that a run would
            choose.
        fused_kernels: whether a GPU computes norms, rotations and gated activations by one kernel each.
        sequences: sequences of a sample.
        fp8: whether a GPU computes the products of linear layers in fp8.
        lora: the adapters that are trained; None if all parameters are.

    Raises:
        UserError: the device lacks the precision, or there are fewer layers than stages.
    """
    workload, strategy = of_config(resolved, shape, sequence, on_cpu=on_cpu if hardware is None else hardware.is_host)
    strategy = replace(strategy, boundaries=boundaries, sequences=sequences)
    if fused_kernels and workload.kernels == "single":
        workload = replace(workload, kernels="fused")
    if fp8:
        workload = replace(workload, precision="fp8")
    if lora is not None:
        workload = replace(workload, lora=lora)
    if hardware is None:
        return Prediction(workload=workload, strategy=strategy, stages=memory_of(workload, strategy))
    require_precision(hardware, workload.precision)
    return estimate(hardware, workload, strategy)


def estimate(hardware: Hardware, workload: Workload, strategy: Strategy) -> Estimate:
    """Predict memory and speed of a layout."""
    return Estimate(
        workload=workload,
        strategy=strategy,
        stages=memory_of(workload, strategy),
        limit_bytes=hardware.limit_bytes,
        hardware=hardware,
        seconds=step_seconds(hardware, workload, strategy),
    )


def memory_of(workload: Workload, strategy: Strategy) -> tuple[StageMemory, ...]:
    """Return the memory of a rank of each stage."""
    stages = strategy_stages(workload, strategy)
    return tuple(stage_memory(workload, strategy, stage, index) for index, stage in enumerate(stages))


def of_config(resolved: Resolved, shape: DecoderShape, sequence: int, *, on_cpu: bool) -> tuple[Workload, Strategy]:
    """Return the workload and the strategy of a resolved config."""
    summed = lookup(resolved.config, "/data_types/grad_accum_dtype")
    width = ELEMENT_BYTES[resolved.precision]
    optimizer = find(str(lookup(resolved.config, "/optimizer/type"))) or DEFAULT
    params = lookup(resolved.config, "/optimizer/params")
    states = optimizer.states_of(params if isinstance(params, Mapping) else {})
    halved = {
        name: lookup(resolved.config, f"/{name}") is True for name in (MASTER_IN_BF16, MASTER_IN_FP16, STATES_IN_BF16)
    }
    workload = Workload(
        shape=shape,
        sequence=sequence,
        precision=resolved.precision,
        gradient_bytes=ELEMENT_BYTES.get(str(summed), width),
        states=states,
        other_states=states if optimizer.other_states is None else optimizer.other_states,
        state_bytes=2 if halved[STATES_IN_BF16] else optimizer.state_bytes,
        master_bytes=2 if halved[MASTER_IN_BF16] or halved[MASTER_IN_FP16] else 4,
        on_cpu=on_cpu,
        kernels="single" if resolved.compile_backend is None else "compiled",
    )
    section = resolved.config.get("zero_optimization")
    zero = section if isinstance(section, Mapping) else {}
    interval = resolved.activation_checkpoint_interval
    offload = _offload(zero, resolved.zero_stage)
    flat_sums = has_flat_sums(workload, resolved.zero_stage, offload)
    overlap = zero.get("overlap_comm", resolved.zero_stage == 3 or flat_sums)
    strategy = Strategy(
        pp_size=resolved.pp_size,
        tp_size=resolved.tp_size,
        dp_size=resolved.dp_size,
        ep_size=resolved.ep_size,
        cp_size=resolved.cp_size,
        micro_batch=resolved.micro_batch,
        accumulation=resolved.accumulation,
        zero_stage=resolved.zero_stage,
        sequence_parallel=resolved.sequence_parallel,
        recompute="full" if interval else "none",
        recompute_every=max(1, interval),
        host_activations=bool(interval)
        and not on_cpu
        and lookup(resolved.config, "/activation_checkpointing/cpu_checkpointing") is True,
        loss_tile=resolved.loss_tile,
        block_tile=resolved.feed_forward_tile,
        attention_tile=resolved.attention_tile,
        offload=offload,
        overlap_data=bool(overlap) and (flat_sums or resolved.zero_stage >= 2),
        gathers_once=_gathers_once(zero, resolved.zero_stage),
        flat_sums=flat_sums,
        reduces_once=resolved.reduces_once,
        sent_bytes=ELEMENT_BYTES.get(str(resolved.config.get("communication_data_type"))),
        bucket=whole(zero.get("reduce_bucket_size")) or 5e8,
        partition=resolved.partition,
        split_table=True,
        schedule=SCHEDULES[resolved.schedule].predicted_as or resolved.schedule,
        chunks=1 if resolved.chunks.folded else resolved.chunks.per_stage,
    )
    return workload, strategy


def has_flat_sums(workload: Workload, zero_stage: int, offload: Offload) -> bool:
    """Return whether a run sums gradients in flat tensors."""
    in_fp32 = workload.gradient_bytes == ELEMENT_BYTES["fp32"]
    return sums_flat(workload.precision, zero_stage, offloads_states=offload != "none", in_fp32=in_fp32)


def _offload(zero: Mapping[str, object], stage: int) -> Offload:
    """Return what the section `zero_optimization` offloads to the host's memory or disks."""

    def is_off(key: str) -> bool:
        return lookup(zero, f"/{key}/device") not in (None, "none")

    states = stage >= 1 and is_off("offload_optimizer")
    parameters = stage == 3 and is_off("offload_param")
    if parameters:
        return "optimizer+parameters" if states else "parameters"
    return "optimizer" if states else "none"


def _gathers_once(zero: Mapping[str, object], stage: int) -> bool:
    """Return whether the harness keeps ZeRO-3's parameters gathered (harness/deepspeed/zero3_parameters.py)."""
    copies = whole(zero.get("zero_hpz_partition_size")) or 1
    return stage == 3 and copies == 1 and _offload(zero, stage) in ("none", "optimizer")


def require_precision(hardware: Hardware, precision: str) -> None:
    """Raise UserError if the device lacks a precision."""
    if precision not in hardware.flops:
        known = ", ".join(hardware.flops)
        raise UserError(f"{hardware.name} has no {precision}: use one of {known}, or add its tflops to the file")
