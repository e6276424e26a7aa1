"""The part of a run's specification that its engine is built from, the traits of its layers, what stays in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.arguments import TrainingArguments
from harness.config import Resolved
from harness.config.values.gradient_sums import sums_flat
from harness.console import Console
from harness.deepspeed.update import Compression
from harness.parallel.pipeline.staged_module import StagedModule
from harness.parallel.tiles import LossTiles
from harness.parallel.values import Value
from harness.topology.groups import Groups
from harness.training.engine.optimizer import GivenOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientCompression(Protocol):
    """Reduces gradients between data-parallel ranks in a few bits per element."""

    def settled(self, resolved: Resolved, groups: Groups, console: Console) -> Resolved:
        """Return the config with the number of bits (measured if "auto") and report it; all ranks call it."""

    def reduction(self, module: StagedModule, groups: Groups, bits: int) -> Compression | None:
        """Return the reduction that averages a stage's gradients in `bits` bits; None for a single data rank."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine is built from, the same on all ranks; `RunSpec` adds the model and the data.

    Attributes:
        compression: the part that reduces gradients in few bits, if the config asks for it; None without that part.
        user_optimizer: the Trainer's `optimizers`; None for the optimizer of the JSON or the arguments.
    """

    args: TrainingArguments
    resolved: Resolved
    max_steps: int
    compression: GradientCompression | None = None
    user_optimizer: GivenOptimizer | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return DTYPES[self.resolved.precision]

    @property
    def is_pipeline(self) -> bool:
        """Whether DeepSpeed's pipeline engine drives the run; ZeRO-2 and ZeRO-3 exclude it."""
        # PipelineEngine asserts it.
        return self.resolved.zero_stage < 2


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """Properties of the layers that an engine depends on.

    Attributes:
        local_states: whether layers pass on tensors that differ between tensor-parallel ranks.
        uses_rng: whether layers may use dropout or other random numbers in training.
        example: inputs of a micro-batch for a user's own layers; None without training data.
        tiles: computes the loss in tiles inside the last layer; None if the last layer returns logits.
    """

    local_states: bool = False
    uses_rng: bool = True
    example: Value | None = None
    tiles: LossTiles | None = None


def has_flat_sums(resolved: Resolved) -> bool:
    """Return whether a run accumulates gradients in flat tensors, one for each parameter group."""
    config = resolved.config
    return sums_flat(
        resolved.precision,
        resolved.zero_stage,
        offloads_states=is_offloaded(config.get("zero_optimization", {}), "offload_optimizer"),
        in_fp32=resolved.precision == "fp32" or config.get("data_types", {}).get("grad_accum_dtype") == "fp32",
    )


def can_keep_fp32(resolved: Resolved) -> bool:
    """Return whether a bf16 run can keep in float32 the parameters that the model lists."""
    return resolved.precision == "bf16" and keeps_wanted(resolved) and obstacle(resolved) is None


def keeps_wanted(resolved: Resolved) -> bool:
    """Return whether the config lets the model keep parameters in float32; an empty list forbids it."""
    return bool(resolved.config.get("data_types", {}).get("keep_in_fp32_modules", "auto") != [])


def obstacle(resolved: Resolved) -> str | None:
    """Return the setting that makes DeepSpeed require one dtype for all parameters, or None."""
    zero = resolved.config.get("zero_optimization", {})
    if resolved.config.get("data_types", {}).get("grad_accum_dtype") != "fp32":
        return "gradients that are accumulated in bf16"
    if resolved.zero_stage < 3:
        return "offload_optimizer below ZeRO-3" if is_offloaded(zero, "offload_optimizer") else None
    if is_offloaded(zero, "offload_param"):
        return "offload_param"
    switches = ("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params", "zero_quantized_weights")
    return next((name for name in switches if zero.get(name)), None)


def is_offloaded(zero: Mapping[str, Mapping[str, object] | None], section: str) -> bool:
    """Return whether a section of `zero_optimization`, such as `offload_param`, offloads anything."""
    return (zero.get(section) or {}).get("device", "none") != "none"
