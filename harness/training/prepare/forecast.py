"""What the planner expects of a run before its model is built, and the refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup
from harness.errors import UserError
from harness.hf.counts import parameter_counts
from harness.planner.counted import with_counts
from harness.planner.estimate import Estimate, estimate, memory_of, of_config
from harness.planner.hardware import GIB, Hardware, load_hardware, names
from harness.planner.memory import StageMemory
from harness.planner.model_config import decoder_of
from harness.resilience.process.memory import device_limit_bytes, host_limit_bytes
from harness.wording import counted

if TYPE_CHECKING:
    from harness.training.prepare.plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run will need and do.

    Attributes:
        stages: memory of a rank of each stage.
        limit: bytes of a rank's device, or its part of the host's memory.
        beside: what the stages do not count, for the message.
        row: of the device's description, as `ds-harness estimate` prints it; None for a device without one.
        guessed: whether the planner cannot explain all parameters of the model, so that nothing is refused by it.
    """

    stages: tuple[StageMemory, ...]
    limit: float
    beside: str = ""
    row: Estimate | None = None
    guessed: bool = False

    def __str__(self) -> str:
        sizes = sorted(stage.total / GIB for stage in self.stages)
        between = f"{sizes[0]:.2f} to {sizes[-1]:.2f}" if len(sizes) > 1 else f"{sizes[0]:.2f}"
        text = f"expected memory: {between} GiB a rank{self.beside}, of {self.limit / GIB:.1f}"
        if self.row is None:
            return text
        seconds, speed = self.row.seconds.total, self.row.tokens_per_second
        return f"{text}; {seconds:.3g} s a step, {speed:,.0f} tokens/s ({self.row.hardware.name})"

    def as_json(self) -> JsonObject:
        """Return what `run.json` keeps."""
        stages = [{"states": stage.states / GIB, "total": stage.total / GIB} for stage in self.stages]
        row = None if self.row is None else self.row.row()
        return {"memory_gib": {"limit": self.limit / GIB, "stages": stages}, "estimate": row}


def forecast(plan: RunPlan, length: int, device: torch.device, local_ranks: int) -> Forecast | None:
    """Return what is expected of a run on samples of `length` tokens; None for a model that the planner cannot read.

    Parameters are counted on the model itself: what a config says of a family that the planner does not know is no
    ground to refuse a run.
    It counts AdamW, so a run with another optimizer, adapters or a model from memory, of which parts may be frozen, has
    no forecast.
    """
    source, kind = plan.source, str(lookup(plan.resolved.config, "/optimizer/type") or "adamw")
    if source is None or source.model is not None or plan.adaptation is not None or "adam" not in kind.lower():
        return None
    limit = device_limit_bytes(device)
    try:
        read = decoder_of(source.config.to_dict(), source.name)
        shape = with_counts(read, parameter_counts(source.skeleton()))
        workload, strategy = of_config(plan.resolved, shape, length, on_cpu=device.type == "cpu")
        stages = memory_of(workload, strategy)
        name = _described(device)
        row = None if name is None else estimate(_device(name, plan.layout.world_size), workload, strategy)
    except (UserError, ArithmeticError, LookupError):  # a run is never refused for what the planner cannot read
        return None
    if limit is None:
        share, beside = host_limit_bytes() / local_ranks, " beside the process itself"
        return Forecast(stages=stages, limit=share, beside=beside, guessed=shape.guessed)
    return Forecast(stages=stages, limit=limit, row=row, guessed=shape.guessed)


def require_memory(found: Forecast, plan: RunPlan, ranks: Sequence[int], device: torch.device) -> str | None:
    """Raise UserError if parameters, gradients and optimizer states alone are more than the memory that there is.

    Of a model whose parameters are a guess, return a warning instead.
    Of a GPU each rank has one; the memory of a host is shared by its `ranks`, and by what they offload to it.
    """
    config = plan.resolved.config
    if lookup(config, "/zero_optimization/offload_optimizer/device") == "nvme":
        return None
    here = [plan.layout.coordinate(rank).stage for rank in ranks]
    needs = [("a rank takes", stage.states, found.limit) for stage in found.stages if device.type != "cpu"]
    shared = sum(
        found.stages[stage].host + (found.stages[stage].states if device.type == "cpu" else 0) for stage in here
    )
    needs.append((f"the {counted(len(ranks), 'rank')} of this host take", shared, host_limit_bytes()))
    for whose, needed, limit in needs:
        if needed > limit and found.guessed:
            return (
                f"this model may need more memory than there is: {whose} for parameters, gradients and optimizer "
                f"states perhaps {needed / GIB:,.1f} GiB, and there is {limit / GIB:,.1f}"
            )
        if needed > limit:
            raise UserError(
                f"not enough memory: what {whose} for parameters, gradients and optimizer states is "
                f"{needed / GIB:,.1f} GiB, and there is {limit / GIB:,.1f}: use more ranks, a higher ZeRO stage or "
                "offload (`ds-harness plan` finds a layout that fits), or start with --skip_memory_check"
            )
    return None


def _device(name: str, world_size: int) -> Hardware:
    """Return a packaged device, with the rate of float32 that torch is set to."""
    hardware = load_hardware(name, world_size)
    return hardware.in_tf32 if torch.get_float32_matmul_precision() != "highest" else hardware


def _described(device: torch.device) -> str | None:
    """Return the packaged description of this GPU, by its name; None for a CPU, which would have to be measured."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((name for name in reversed(names()) if set(name.split("-")) <= set(words)), None)
