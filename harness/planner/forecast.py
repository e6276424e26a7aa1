"""Predict memory and speed of a run before its model is built, and refuse a run that cannot fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from deepspeed.accelerator import get_accelerator

from harness.arguments import TrainingArguments
from harness.config import Resolved
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup
from harness.errors import UserError
from harness.hf.counts import counts_of
from harness.hf.skeleton import ModelSource
from harness.planner.counted_shape import with_counts
from harness.planner.estimate import Prediction, predict
from harness.planner.hardware import GIB, Hardware, load_hardware, names
from harness.planner.memory import mask_bytes
from harness.planner.model_config import decoder_of
from harness.planner.step import strategy_stages
from harness.topology.layout import Layout
from harness.wording import counted

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction for a run, before its model is built.

    Attributes:
        stages: the pipeline stage of each rank of this host.
    """

    prediction: Prediction
    resolved: Resolved
    args: TrainingArguments
    device: torch.device
    stages: Sequence[int]

    def __str__(self) -> str:
        return str(self.prediction)

    def require_memory(self) -> str | None:
        """Raise UserError if the run cannot fit into memory; return a warning if its size is a guess."""
        if self.args.attn_implementation in (None, "sdpa", "eager"):  # others make no mask [tokens, tokens]
            require_masks(self.prediction, packed=self.args.packing)
        return require_states(self.prediction, self.resolved, self.stages, self.device)

    def for_boundaries(self, boundaries: Sequence[int]) -> Self:
        """Return the forecast for the stage boundaries that the run has chosen."""
        return replace(self, prediction=self.prediction.for_boundaries(boundaries))

    def as_json(self) -> JsonObject:
        """Return the JSON for run.json."""
        return self.prediction.as_json()


def forecast(
    source: ModelSource,
    resolved: Resolved,
    layout: Layout,
    args: TrainingArguments,
    *,
    length: int,
    device: torch.device,
    ranks: Sequence[int],
    adapters: bool,
    sequences: int = 1,
) -> Forecast | None:
    """Predict memory and speed of a run on samples of `length` tokens; None if the planner cannot.

    Parameters are counted on the model itself, as the config of an unknown family does not give their number. The
    planner assumes that all parameters are trained, so there is no prediction for adapters or for a model from memory.

    Args:
        ranks: the ranks of this host.
        sequences: sequences of a sample.
    """
    if source.model is not None or adapters:
        return None
    on_cpu = device.type == "cpu"
    name = _described(device)
    try:
        read = decoder_of(source.config.to_dict(), source.name)
        shape = with_counts(read, counts_of(source.config))
        hardware = None if name is None else _device(name, layout.world_size)
        fused = args.fused_kernels or args.use_liger_kernel is True
        found = predict(
            resolved,
            shape,
            length,
            hardware=hardware,
            on_cpu=on_cpu,
            fused_kernels=fused,
            sequences=sequences,
            fp8=args.fp8 == "rowwise",
        )
    except (UserError, ArithmeticError):  # a config that the planner cannot read must not stop a run
        return None
    limit = device_limit_bytes(device)  # measured: other processes may use a part of the device
    return Forecast(
        prediction=replace(found, limit_bytes=host_limit_bytes() / len(ranks) if limit is None else limit),
        resolved=resolved,
        args=args,
        device=device,
        stages=[layout.coordinate(rank).stage for rank in ranks],
    )


def require_masks(found: Prediction, *, packed: bool) -> None:
    """Raise UserError if the attention mask [tokens, tokens] alone exceeds the memory."""
    workload, strategy = found.workload, found.strategy
    needed = max(mask_bytes(workload, strategy, stage, packed=packed) for stage in strategy_stages(workload, strategy))
    if found.limit_bytes is not None and needed > found.limit_bytes:
        raise UserError(
            f"not enough memory: a mask of {workload.sequence:,} x {workload.sequence:,} tokens needs "
            f"{needed / GIB:,.1f} GiB, and {found.limit_bytes / GIB:,.1f} GiB are available: set tiling.attention to "
            "1024, or start with --skip_memory_check"
        )


def require_states(found: Prediction, resolved: Resolved, stages: Sequence[int], device: torch.device) -> str | None:
    """Raise UserError if parameters, gradients and optimizer states alone exceed the memory.

    If the number of parameters is a guess, return a warning instead. Each rank has its own GPU, while the ranks of a
    host, which have these `stages`, share its memory, also for what they offload.
    """
    if found.limit_bytes is None or lookup(resolved.config, "/zero_optimization/offload_optimizer/device") == "nvme":
        return None
    needs = [("of a rank", stage.states, found.limit_bytes) for stage in found.stages if device.type != "cpu"]
    shared = sum(
        found.stages[stage].host + (found.stages[stage].states if device.type == "cpu" else 0) for stage in stages
    )
    needs.append((f"of the {counted(len(stages), 'rank')} of this host", shared, host_limit_bytes()))
    for whose, needed, limit in needs:
        if needed > limit and found.workload.shape.guessed:
            return (
                f"this model may need more memory than there is: parameters, gradients and optimizer states {whose} "
                f"need perhaps {needed / GIB:,.1f} GiB, and {limit / GIB:,.1f} GiB are available"
            )
        if needed > limit:
            raise UserError(
                f"not enough memory: parameters, gradients and optimizer states {whose} need {needed / GIB:,.1f} GiB, "
                f"and {limit / GIB:,.1f} GiB are available: use more ranks, a higher ZeRO stage or offload "
                "(`ds-harness plan` finds a layout that fits), or start with --skip_memory_check"
            )
    return None


def _device(name: str, world_size: int) -> Hardware:
    """Return a packaged device description, with TF32's rate for float32 if torch is set to it."""
    hardware = load_hardware(name, world_size)
    return hardware.in_tf32 if torch.get_float32_matmul_precision() != "highest" else hardware


def _described(device: torch.device) -> str | None:
    """Return the name of the packaged description of this GPU; None for a CPU: it would have to be measured."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((name for name in reversed(names()) if set(name.split("-")) <= set(words)), None)


def device_limit_bytes(device: torch.device) -> int | None:
    """Return the memory of an accelerator in bytes; None for a CPU, whose ranks share the host's memory."""
    return None if device.type == "cpu" else int(get_accelerator().total_memory(device.index))


def host_limit_bytes() -> float:
    """Return the memory limit of all processes on this host: memory plus swap, or the container's limit, in bytes."""
    limits = [float("inf")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        limits.append(sizes["MemTotal"] + sizes.get("SwapTotal", 0))
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # "max" is not a number
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)
