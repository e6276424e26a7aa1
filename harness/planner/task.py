"""What is asked of a plan: a model, a device, a number of ranks and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.config.model.plans import plan_refusal, spreads_experts
from harness.planner.habits import DEEPSPEED, Habits
from harness.planner.hardware import Hardware
from harness.planner.model_config import text_decoder
from harness.planner.shape import DecoderShape
from harness.planner.workload import Workload

LARGEST = 10**7  # of any size
SAMPLES_PER_RANK = 8  # where no batch is given: HF's default micro-batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be laid out: `global_batch` samples a step on `world_size` ranks.

    Attributes:
        no_tensor: why the model cannot be cut for tensor parallelism; None if it can, or if that is not known.
        spreads_experts: whether tensor-parallel ranks can hold whole experts instead of a part of each.
    """

    hardware: Hardware
    workload: Workload
    world_size: int
    global_batch: int
    no_tensor: str | None = None
    spreads_experts: bool = False


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
    """Return the task for the model of a config.json, which the user calls `source`.

    By default the shape is read from the config, a rank has 8 samples, and the precision is bf16 where that is faster
    than fp32.
    """
    chosen = precision or _usual_precision(hardware)
    workload = Workload(
        shape=shape or text_decoder(config, source),
        sequence=sequence,
        precision=chosen,
        gradient_bytes=2 if chosen == "fp16" else 4,
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
