"""Parameters that stay in float32 in a bf16 run, where DeepSpeed can have them.

Its optimizers flatten each group of parameters by itself, so a group may have another dtype. ZeRO-3 holds all groups in
one flat tensor, and an offloaded optimizer keeps gradients in one dtype: there everything is bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from harness.config import Resolved


def can_keep_fp32(resolved: Resolved) -> bool:
    """Whether parameters may stay in float32 beside those in bf16."""
    zero = resolved.config.get("zero_optimization", {})
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    in_fp32 = resolved.config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return resolved.precision == "bf16" and resolved.zero_stage < 3 and in_fp32 and not offloaded


@contextmanager
def keeping_fp32() -> Iterator[None]:
    """Let an engine that is made meanwhile leave parameters that are kept in float32 as they are.

    DeepSpeed casts all parameters of a model to one dtype.
    """
    of_deepspeed = DeepSpeedEngine._cast_module_mixed_precision

    def cast(engine: Any, *args: Any, **kwargs: Any) -> None:
        kept = [(p, p.data) for p in engine.module.parameters() if getattr(p, "kept_in_fp32", False)]
        of_deepspeed(engine, *args, **kwargs)
        for parameter, data in kept:
            parameter.data = data

    DeepSpeedEngine._cast_module_mixed_precision = cast
    try:
        yield
    finally:
        DeepSpeedEngine._cast_module_mixed_precision = of_deepspeed
