"""Keep chosen parameters in float32 in an engine that trains the others in bf16.

DeepSpeed casts all parameters of a model to one dtype. ZeRO-0 to 2 flatten each parameter group by itself, so the
groups may differ in dtype. ZeRO-3 puts all groups into one flat tensor and reduces all gradients in one dtype; here it
gets one tensor and one bucket for each dtype. The attribute `kept_in_fp32` marks a parameter that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from torch import Tensor

from harness.deepspeed.flat_tensors import EngineOptimizer


@contextmanager
def keeping_fp32() -> Iterator[None]:
    """Leave parameters marked `kept_in_fp32` uncast in an engine that is built in this context."""
    of_engine, of_zero3 = DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment

    def cast(engine: DeepSpeedEngine, *args: object, **kwargs: object) -> None:
        # DeepSpeed casts a module's parameters all at once, so the float32 values are put back afterwards
        kept = [(p, p.data) for p in engine.module.parameters() if is_kept(p)]
        of_engine(engine, *args, **kwargs)
        for parameter, data in kept:
            parameter.data = data

    def flatten(tensors: Sequence[Tensor]) -> Tensor | _FlatRuns:
        # runs of equal dtype, and not one tensor per dtype: DeepSpeed addresses parameters by their offset in this
        # order
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        return _FlatRuns([of_zero3(run) for run in runs]) if len(runs) > 1 else of_zero3(tensors)

    DeepSpeedEngine._cast_module_mixed_precision = cast
    stage3.defragment = flatten
    try:
        yield
    finally:
        DeepSpeedEngine._cast_module_mixed_precision = of_engine
        stage3.defragment = of_zero3


class _FlatRuns:
    """Flat tensors of different dtypes that stand for one flat tensor; `narrow` is all that DeepSpeed calls on it."""

    def __init__(self, runs: Sequence[Tensor]) -> None:
        self._runs = runs

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` elements from `start`, which must lie in one of the tensors."""
        # DeepSpeed cuts out sub-groups. Each is of one parameter group, so of one dtype, and none reaches into the next
        # run. `start` counts from the first run; here it becomes a place in the run that is found.
        for run in self._runs:
            if start < run.numel():
                break
            start -= run.numel()
        return run.narrow(dim, start, length)


def reduce_fp32_gradients(optimizer: EngineOptimizer) -> None:
    """Have ZeRO-3 reduce the gradients of float32 parameters in float32, if there are any beside those in bf16."""
    if not isinstance(optimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        return
    kept = [p for group in optimizer.fp16_groups for p in group if is_kept(p)]
    if not kept or torch.float32 in optimizer.ipg_buckets:
        return
    bucket = stage3.IPGBucketZ3()
    if optimizer.contiguous_gradients:
        size = min(optimizer.reduce_bucket_size, sum(p.ds_numel for p in kept))
        bucket.buffer = torch.empty(size, dtype=torch.float32, device=optimizer.device)
    optimizer.ipg_buckets[torch.float32] = bucket
    # without it, float32 gradients would be rounded to bf16 for the reduce-scatter
    of_others = optimizer.get_param_comm_dtype
    optimizer.get_param_comm_dtype = lambda p: torch.float32 if is_kept(p) else of_others(p)


def is_kept(parameter: Tensor) -> bool:
    """Return whether a parameter stays in float32."""
    return bool(getattr(parameter, "kept_in_fp32", False))
