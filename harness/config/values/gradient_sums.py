"""Decide whether a run accumulates gradients in the harness's flat tensors, and the size of their buckets."""

from __future__ import annotations

SMALLEST_BUCKET = 1 << 22  # elements: 16 MiB in float32, which a fast network sends in a millisecond
MOST_BUCKETS = 32  # of a large model


def sums_flat(precision: str, zero_stage: int, *, offloads_states: bool, in_fp32: bool) -> bool:
    """Return whether gradients are accumulated in flat tensors (`deepspeed/flat_optimizer.py`): for bf16 below ZeRO-2,
    and for float32 at ZeRO-1. Otherwise torch, or an optimizer of DeepSpeed, accumulates them.

    Args:
        in_fp32: whether gradients are accumulated in float32 (`grad_accum_dtype`), which bf16 at ZeRO-1 may not do.
    """
    if offloads_states or precision == "fp16":
        return False
    return (zero_stage == 1 and in_fp32) or (zero_stage == 0 and precision == "bf16")


def bucket_size(asked: object, elements: int) -> int:
    """Return the number of gradients that data-parallel ranks reduce at once.

    Args:
        asked: `reduce_bucket_size` of the config; None: by size.
        elements: number of parameters of this rank.
    """
    return int(asked) if isinstance(asked, int | float) else max(SMALLEST_BUCKET, elements // MOST_BUCKETS)
