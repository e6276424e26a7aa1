"""Published measurements as `ds-harness plan --like PROGRAM` is asked for them: model, device, layout and batch alone.

What a row leaves open is what a user of the planner leaves open: the habits of its program, one word for each, and the
device as its file describes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from published_shapes import Unusable, first_of, number, shape_of

from harness.planner.hardware import Hardware, Link, load_hardware
from harness.planner.search import Task, candidates
from harness.planner.shape import DecoderShape
from harness.planner.workload import HABITS, Offload, Strategy, Workload

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
    like: str
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
            "pp": self.strategy.pp_size,
            "tp": self.strategy.tp_size,
            "ep": self.strategy.ep_size,
            "dp": self.strategy.dp_size,
        }
        axes = " x ".join(name for name, size in sizes.items() if size > 1)
        return f"{axes or 'one device'}, ZeRO-{self.strategy.zero_stage}"


def case_of(row: dict[str, str]) -> Case:
    """Return the measurement of a row. Unusable if data is missing or it uses a feature that no plan has."""
    if not row["layers"] or not row["hidden"]:
        raise Unusable("the shape of the model is not published")
    if "LoRA" in row["notes"]:
        raise Unusable("only adapters are trained")
    if "treat as suspect" in row["notes"]:
        raise Unusable("erratic steps")
    if not row["seq"]:
        raise Unusable("the length of the sequence is not published")
    if number(row, "cp") > 1:
        raise Unusable("context parallelism by a ring, which no plan has")
    if number(row, "pp") > 1 and not row["global_batch"]:
        raise Unusable("the batch of a pipeline is not published")
    if "ZB-2p" in row["system"]:
        raise Unusable("a schedule that no plan has")
    like, shape, hardware = program_of(row), shape_of(row), device_of(row)
    workload = workload_of(row, shape, like)
    strategy = listed(workload, hardware, strategy_of(row, like))
    return Case(
        system=row["system"],
        like=like,
        model=row["model"],
        device=row["gpu"],
        hardware=hardware,
        workload=workload,
        strategy=strategy,
        seconds=_seconds(row, workload, strategy),
        peak_gib=float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None,
    )


def _seconds(row: dict[str, str], workload: Workload, strategy: Strategy) -> float:
    """Return the seconds of a step: as published, or by the tokens or operations a second that are.

    Operations are counted as Narayanan et al. 2021 (section 5.1) do: attention whole, and recomputation with the rest.
    """
    if row["step_seconds"]:
        return float(row["step_seconds"])
    tokens = strategy.global_batch * workload.sequence / strategy.world_size
    if row["tokens_per_s_per_gpu"]:
        return tokens / float(row["tokens_per_s_per_gpu"])
    if not row["tflops_per_gpu"]:
        raise Unusable("no speed")
    whole = 2 * workload.sequence  # causal attention over a sequence of twice the length meets as many tokens
    operations = workload.shape.flops_per_token(whole) * (4 / 3 if strategy.recompute == "full" else 1)
    return tokens * operations / (float(row["tflops_per_gpu"]) * 1e12)


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
    return replace(
        hardware,
        matmul_efficiency=efficiency,
        attention_efficiency=hardware.attention_efficiency * scale,
        torch_attention_efficiency=hardware.torch_attention_efficiency * scale,
        memory_bytes_per_second=rate,
    )


def program_of(row: dict[str, str]) -> str:
    """Return the word for a row's program, or for the one that is most like it."""
    if "DeepCompile" in row["system"]:  # which schedules gathering and reducing itself
        return "torchtitan"
    if "DeepSpeed" in row["system"] or row["system"] == "nanotron":  # whose layers are plain operations of torch, too
        return "deepspeed"
    sharded = "FSDP" in row["zero_or_distopt"] and "FSDP=0" not in row["zero_or_distopt"]
    return "torchtitan" if sharded or "FSDP" in row["system"] else "megatron"


def workload_of(row: dict[str, str], shape: DecoderShape, like: str) -> Workload:
    """Return what a row trains."""
    precision = row["precision"].lower()
    is_fp8 = "fp8" in precision or "float8" in precision
    precision = "fp4" if "fp4" in precision else "fp8" if is_fp8 else "bf16"
    return Workload(shape=shape, sequence=number(row, "seq"), precision=precision, habits=HABITS[like])


def listed(workload: Workload, hardware: Hardware, wanted: Strategy) -> Strategy:
    """Return the layout as `ds-harness plan` has it in its table. Unusable where it has none like it."""
    experts = any(layer.experts for layer in workload.shape.layers)
    task = Task(
        hardware=hardware,
        workload=workload,
        world_size=wanted.world_size,
        global_batch=wanted.global_batch,
        spreads_experts=experts,
    )
    found = _table(task).get(_layout(wanted))
    if found is None:
        raise Unusable("a layout that no plan lists")
    return found


@lru_cache(maxsize=64)
def _table(task: Task) -> dict[tuple[object, ...], Strategy]:
    found: dict[tuple[object, ...], Strategy] = {}
    for one in candidates(task):
        if isinstance(one, Strategy):
            found.setdefault(_layout(one), one)  # the plain one comes before those that need less memory
    return found


def _layout(strategy: Strategy) -> tuple[object, ...]:
    """Return what a user sees of a layout."""
    return (
        *(strategy.pp_size, strategy.tp_size, strategy.dp_size, strategy.ep_size),
        *(strategy.micro_batch, strategy.accumulation, strategy.zero_stage, strategy.offload, strategy.recompute),
        *(strategy.schedule, strategy.chunks, strategy.sequence_parallel),
    )


def strategy_of(row: dict[str, str], like: str) -> Strategy:
    """Return how a row is laid out; a micro-batch of one sample, and one a step, where it does not say."""
    habits, system = HABITS[like], row["system"]
    tp, pp = number(row, "tp"), number(row, "pp")
    dp = number(row, "gpus") // (tp * pp)
    micro = number(row, "micro_batch")
    batch = number(row, "global_batch", micro * dp)
    if dp < 1 or batch % (dp * micro):
        raise Unusable("sizes that do not multiply")
    moved: dict[str, Offload] = {"optimizer": "optimizer", "optimizer+parameters": "optimizer+parameters"}
    said = next((stage for stage in (3, 2, 1) if f"ZeRO-{stage}" in row["zero_or_distopt"]), 1)
    fixed = habits.zero_stage_of_pipeline if pp > 1 else habits.zero_stage
    zero = said if fixed is None else fixed
    schedules = {"ZB-1p": "zero-bubble", "ZB-V": "zero-bubble-v"}
    parts = number(row, "vpp")
    if system.endswith("1F1B-I"):  # parts of one layer, as the published memory says; two layers less at the ends
        parts = (number(row, "layers") + 2) // pp
    return Strategy(
        pp_size=pp,
        tp_size=tp,
        dp_size=dp,
        ep_size=number(row, "ep", dp if "DeepEP" in row["notes"] else 1),  # which sends tokens to expert-parallel ranks
        micro_batch=micro,
        accumulation=batch // (dp * micro),
        zero_stage=zero,
        offload=moved.get(row["zero_or_distopt"].partition("offload:")[2], "none"),
        recompute="full" if row["recompute"].startswith("full") else "none",
        schedule=next((value for name, value in schedules.items() if name in system), "1f1b"),
        chunks=parts,
        sequence_parallel=tp > 1 and (habits.shares_sequence or row["seq_parallel"].startswith("yes")),
    )
