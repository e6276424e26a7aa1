"""Parameters that stay in float32 in a bf16 run, as transformers loads them.

ZeRO-0 to 2 flatten each group of parameters by itself, so a group may have another dtype. ZeRO-3 puts all groups into
one flat tensor and reduces all gradients in one dtype; here it gets a tensor and a bucket for each dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from torch import Tensor

from harness.config import Resolved


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


def _is_offloaded(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") != "none"


@contextmanager
def keeping_fp32() -> Iterator[None]:
    """Let an engine that is made meanwhile leave parameters that are kept in float32 as they are.

    DeepSpeed casts all parameters of a model to one dtype, and ZeRO-3 flattens them into one tensor.
    """
    of_engine, of_zero3 = DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment

    def cast(engine: Any, *args: Any, **kwargs: Any) -> None:
        kept = [(p, p.data) for p in engine.module.parameters() if getattr(p, "kept_in_fp32", False)]
        of_engine(engine, *args, **kwargs)
        for parameter, data in kept:
            parameter.data = data

    def flatten(tensors: Sequence[Tensor]) -> Any:
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        return _FlatRuns([of_zero3(run) for run in runs]) if len(runs) > 1 else of_zero3(tensors)

    DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment = cast, flatten
    try:
        yield
    finally:
        DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment = of_engine, of_zero3


class _FlatRuns:
    """Flat tensors of different dtypes, one after the other, of which parts are taken as of one tensor."""

    def __init__(self, runs: Sequence[Tensor]) -> None:
        self._runs = runs

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` elements from `start`; they lie in one run."""
        for run in self._runs:
            if start < run.numel():
                break
            start -= run.numel()
        return run.narrow(dim, start, length)


def reduce_fp32_gradients(optimizer: Any) -> None:
    """Have ZeRO-3 reduce the gradients of parameters in float32 in float32, if there are any beside those in bf16."""
    if not isinstance(optimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        return
    kept = [p for group in optimizer.fp16_groups for p in group if getattr(p, "kept_in_fp32", False)]
    if not kept or torch.float32 in optimizer.ipg_buckets:
        return
    bucket = stage3.IPGBucketZ3()
    if optimizer.contiguous_gradients:
        size = min(optimizer.reduce_bucket_size, sum(p.ds_numel for p in kept))
        bucket.buffer = torch.empty(size, dtype=torch.float32, device=optimizer.device)
    optimizer.ipg_buckets[torch.float32] = bucket
    of_others = optimizer.get_param_comm_dtype
    optimizer.get_param_comm_dtype = lambda p: torch.float32 if getattr(p, "kept_in_fp32", False) else of_others(p)
