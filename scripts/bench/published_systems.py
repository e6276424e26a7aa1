"""What the programs of published measurements do where a row does not say it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from published_recipes import (
    checkpoints,
    hides_experts,
    predicts_two,
    recomputes_up,
    reduces_narrow,
    replays_layers,
    replays_step,
    sends_copies,
)
from published_shapes import Unusable, first_of, number, shape_of

from harness.planner.estimate import memory_of
from harness.planner.hardware import Hardware, Link, load_hardware
from harness.planner.shape import DecoderShape
from harness.planner.workload import Recompute, Schedule, Strategy, Workload, layer_parameters

DEVICES = {
    "A100-40GB": "a100-40gb",
    "A100": "a100-80gb",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: what ran, where, the seconds of a step, and the peak memory if that was measured too."""

    system: str
    model: str
    device: str
    hardware: Hardware
    workload: Workload
    strategy: Strategy
    seconds: float
    peak_gib: float | None = None

    @property
    def is_multi_node(self) -> bool:
        """Whether it ran on several nodes."""
        return self.strategy.world_size > self.hardware.node_size

    @property
    def kind(self) -> str:
        """Return which axes of parallelism it used."""
        sizes = {
            "pp": self.strategy.pipeline,
            "tp": self.strategy.tensor,
            "cp": self.strategy.context,
            "ep": self.strategy.expert,
            "dp": self.strategy.data,
        }
        axes = " x ".join(name for name, size in sizes.items() if size > 1)
        return f"{axes or 'one device'}, ZeRO-{self.strategy.zero_stage}"


def case_of(row: dict[str, str]) -> Case:
    """Return the measurement of a row."""
    if not row["layers"] or not row["hidden"]:
        raise Unusable("the shape of the model is not published")
    if "LoRA" in row["notes"]:
        raise Unusable("only adapters are trained")
    if "treat as suspect" in row["notes"]:
        raise Unusable("erratic steps")
    if not row["seq"] or not row["micro_batch"] or not row["global_batch"]:
        raise Unusable("batch or sequence length is not published")
    shape = shape_of(row)
    hardware = device_of(row)
    workload, strategy = workload_of(row, shape), strategy_of(row)
    if strategy.zero_stage == 3:  # FSDP reduces the gradients of a layer at once, without buckets
        strategy = replace(strategy, bucket=max(layer_parameters(strategy, layer) for layer in shape.layers))
    if not row["recompute"] and strategy.zero_stage == 3:
        said = checkpoints(row)
        if said or (said is None and not _fits(hardware, workload, strategy)):
            strategy = replace(strategy, recompute="full")
    if not row["step_seconds"]:
        raise Unusable("no step time")
    return Case(
        system=row["system"],
        model=row["model"],
        device=row["gpu"],
        hardware=hardware,
        workload=workload,
        strategy=strategy,
        seconds=float(row["step_seconds"]),
        peak_gib=float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None,
    )


def _fits(hardware: Hardware, workload: Workload, strategy: Strategy) -> bool:
    """Whether a run that does not say if it recomputes can do without."""
    return max(stage.total for stage in memory_of(workload, strategy)) <= hardware.limit_bytes


@cache
def _device(name: str, network_gb: float | None) -> Hardware:
    hardware = load_hardware(name)
    if network_gb is None:
        return hardware
    return replace(hardware, network=Link(bytes_per_second=network_gb * 1e9, hop_seconds=hardware.network.hop_seconds))


def device_of(row: dict[str, str]) -> Hardware:
    """Return the device of a row, with the network that the row names."""
    name = first_of(DEVICES, row["gpu"])
    if name is None:
        raise Unusable("the device is not known")
    hardware = _device(name, 0.9 * 12.5 if "800 Gbps/node" in row["notes"] else None)
    return _at_500_watts(hardware) if "500W" in row["gpu"] else hardware


@cache
def _at_500_watts(hardware: Hardware) -> Hardware:
    """Return an H100 of 500 W with HBM2e: the clock falls with about the square root of the power."""
    scale = (500 / 700) ** 0.5
    efficiency = {key: value * scale for key, value in hardware.matmul_efficiency.items()}
    rate = hardware.memory_bytes_per_second * 2400 / 3350
    attention = hardware.attention_efficiency * scale
    return replace(hardware, matmul_efficiency=efficiency, attention_efficiency=attention, memory_bytes_per_second=rate)


def _attention_speeds(row: dict[str, str]) -> tuple[float, float]:
    """Return the rates of the program's attention beside the device's best kernels, forward and backward.

    On an A100 the second FlashAttention is 1.3 to 1.5 times as fast forward as the first in Triton, by which all of
    llm-foundry's benchmarks ran but the large ones, and twice as fast backward; it is twice as fast as the first in
    CUDA (Dao 2023, section 4.1). It reaches 35% of an H100, where the third reaches 55% (Shah et al. 2024).
    """
    second = 0.35 / 0.55 if row["gpu"].startswith("H100") else 1.0
    if "llm-foundry" in row["system"]:
        return (0.5 if "Large Scale" in row["notes"] else 1 / 1.4) * second, 0.5 * second
    return (second, second) if row["system"] in ("torchtitan", "nanotron") else (1.0, 1.0)


@dataclass(frozen=True)
class Program:
    """What a program does, by its name and its own words for it.

    Attributes:
        is_megatron: of that family, whose layers, optimizer and overlap the others do not have.
        is_early: before FlashAttention and overlap, or not using them.
    """

    is_fsdp: bool
    is_megatron: bool
    is_early: bool

    @classmethod
    def of(cls, row: dict[str, str]) -> Program:
        """Return the program of a row."""
        system, sharded = row["system"], row["zero_or_distopt"]
        is_fsdp = any(word in sharded for word in ("FSDP", "ZeRO-3")) and "FSDP=0" not in sharded
        is_early = "DeepSpeed" in system or "PTD" in system or row["recompute"].startswith("selective (attention")
        is_early = is_early or (system == "Megatron-LM" and row["recompute"] == "full")
        return cls(is_fsdp, not is_fsdp and "DeepSpeed" not in system, is_early)


def workload_of(row: dict[str, str], shape: DecoderShape) -> Workload:
    """Return what a row trains."""
    system, precision, program = row["system"], row["precision"].lower(), Program.of(row)
    is_eager = system in ("torchtitan", "nanotron") and "compile" not in row["notes"]
    return Workload(
        shape=shape,
        sequence=number(row, "seq"),
        precision="fp4" if "fp4" in precision else "fp8" if "fp8" in precision or "float8" in precision else "bf16",
        gradient_bytes=4 if program.is_megatron and not reduces_narrow(row) else 2,
        sums_in_place=program.is_megatron,
        fused_attention=not program.is_early and "ZB" not in system and "1F1B" not in system,
        softmax_heads=4 if program.is_early else 1,
        attention_speed=_attention_speeds(row)[0],
        attention_backward_speed=_attention_speeds(row)[1],
        fused_elementwise=not is_eager,
        grouped_experts=replays_step(row),  # the others multiply experts with Transformer Engine's GroupedLinear
        fused_experts=replays_step(row),
        replayed=replays_step(row) or replays_layers(row),
        loss_in_place=system == "nanotron",  # its cross entropy writes exponentials and gradient over the fp32 logits
    )


def _cannot_recompute(row: dict[str, str]) -> bool:
    """Whether a row's recomputation is only inferred, and its speed excludes it.

    That of vTrain's runs is taken from defaults of another program. On one node, a sample of 1,024 tokens more in a
    micro-batch costs a layer of width 2,048 another 1.88 ms. With recomputation that were 0.45 TFLOP of products beside
    0.85 GB that other operations move: some 320 TFLOP/s, above the device's peak of 312.
    """
    return "not in the CSV" in row["notes"] and number(row, "gpus") <= 8


def _recompute(row: dict[str, str]) -> Recompute:
    """Return what a row's backward computes again, but for what memory does not allow to keep."""
    if row["recompute"].startswith("selective"):  # torchtitan saves attention and every second matrix product
        return "half" if row["system"] == "torchtitan" else "selective"
    if row["recompute"].startswith("full") and not _cannot_recompute(row):
        return "full"
    return "up" if recomputes_up(row) else "none"


def strategy_of(row: dict[str, str]) -> Strategy:
    """Return how a row is laid out."""
    system, program = row["system"], Program.of(row)
    tp, pp, cp = number(row, "tp"), number(row, "pp"), number(row, "cp")
    dp = number(row, "gpus") // (tp * pp * cp)
    micro, batch = number(row, "micro_batch"), number(row, "global_batch")
    expert = number(row, "ep", dp if "DeepEP" in row["notes"] else 1)  # DeepEP sends tokens to expert-parallel ranks
    if dp < 1 or batch % (dp * micro):
        raise Unusable("sizes that do not multiply")
    is_modern = program.is_megatron and not program.is_early
    overlaps = is_modern and not system.startswith("Megatron-LM")  # by default, as the recipes of the others ask for it
    shares_states = "distributed" in row["zero_or_distopt"] or any(n in system for n in ("NeMo", "Bridge", "nanotron"))
    shares_sequence = row["seq_parallel"].startswith("yes") or (is_modern and tp > 1)
    schedules: dict[str, Schedule] = {"ZB-1p": "zero-bubble", "ZB-2p": "zero-bubble-2p", "ZB-V": "zero-bubble-v"}
    schedule = next((value for name, value in schedules.items() if name in system), "1f1b")
    parts = number(row, "vpp")
    if system.endswith("1F1B-I"):  # parts of one layer, as the published memory says; two layers less at the ends
        parts = (number(row, "layers") + 2) // pp
    return Strategy(
        pipeline=pp,
        tensor=tp,
        data=dp,
        context=cp,
        expert=expert,
        tokens_travel=True,
        micro_batch=micro,
        accumulation=batch // (dp * micro),
        zero_stage=3 if program.is_fsdp else int(shares_states),
        recompute=_recompute(row),
        schedule=schedule,
        virtual_stages=parts,
        sequence_parallel=shares_sequence,
        split_table=shares_sequence,
        gathers_again=program.is_megatron and system != "nanotron",
        overlap_data=overlaps,
        overlap_parameters=overlaps and system != "nanotron",  # which gathers them behind its update
        overlap_tensor=0.5 if program.is_megatron and ("NeMo" in system or "Bridge" in system) else 0.0,
        overlap_experts=hides_experts(row),
        sends_copies=sends_copies(row),
        split_sends="Megatron" in system and not shares_sequence,  # by default, in its own pipeline and in DeepSpeed's
        overlap_pipeline=is_modern and parts > 1,  # Megatron does so by default, in its interleaved schedule
        narrow_gathers=is_modern and system != "nanotron",
        fused_sums=is_modern and system != "nanotron",  # by default, as its container has APEX
        # nanotron weighs blocks, the head among them, and so do the layouts that recipes write out for DeepSeek
        partition="balanced" if system == "nanotron" or predicts_two(row) else "type:DecoderLayer",
    )
