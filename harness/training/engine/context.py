"""Where an engine is built, what it must know of its layers, and which parameters stay in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.arguments import TrainingArguments
from harness.config import Resolved
from harness.parallel.tiles import LossTiles
from harness.parallel.values import Value
from harness.topology.groups import Groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class EngineContext:
    """Where an engine is built: the run's arguments and config, and this rank's place and device."""

    args: TrainingArguments
    resolved: Resolved
    groups: Groups
    device: torch.device
    max_steps: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return DTYPES[self.resolved.precision]

    @property
    def is_pipeline(self) -> bool:
        """Whether DeepSpeed's pipeline engine drives the run; ZeRO-2 and ZeRO-3 exclude it."""
        return self.resolved.zero_stage < 2


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """What an engine must know of its layers.

    Attributes:
        local_states: whether they hand on tensors that are not the same on all tensor-parallel ranks.
        draws: whether they may draw random numbers in training.
        example: inputs of a micro-batch, for layers of a user's own where there is training data.
        tiles: lets the last layer compute the loss in tiles; None where it gives logits.
    """

    local_states: bool = False
    draws: bool = True
    example: Value | None = None
    tiles: LossTiles | None = None


def can_keep_fp32(resolved: Resolved) -> bool:
    """Whether parameters of the model stay in float32 beside those in bf16."""
    return resolved.precision == "bf16" and keeps_wanted(resolved) and obstacle(resolved) is None


def keeps_wanted(resolved: Resolved) -> bool:
    """Whether the config leaves it to the model what stays in float32; an empty list says nothing does."""
    return bool(resolved.config.get("data_types", {}).get("keep_in_fp32_modules", "auto") != [])


def obstacle(resolved: Resolved) -> str | None:
    """Return the part of the config with which DeepSpeed has one dtype for all parameters; None if there is none."""
    zero = resolved.config.get("zero_optimization", {})
    if resolved.config.get("data_types", {}).get("grad_accum_dtype") != "fp32":
        return "gradients that are accumulated in bf16"
    if resolved.zero_stage < 3:
        return "offload_optimizer below ZeRO-3" if _is_offloaded(zero, "offload_optimizer") else None
    if _is_offloaded(zero, "offload_param"):
        return "offload_param"
    switches = ("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params", "zero_quantized_weights")
    return next((name for name in switches if zero.get(name)), None)


def _is_offloaded(zero: Mapping[str, Mapping[str, object] | None], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") != "none"
