"""Which configs leave parameters in float32 in a bf16 run, as transformers loads them."""

from __future__ import annotations

from collections.abc import Mapping

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


def _is_offloaded(zero: Mapping[str, Mapping[str, object] | None], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") != "none"
