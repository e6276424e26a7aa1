"""Which runs sum gradients in flat tensors of the harness, and how many gradients are then reduced at once."""

from __future__ import annotations

SMALLEST_BUCKET = 1 << 22  # elements: 16 MiB in float32, which a fast network sends in a millisecond
MOST_BUCKETS = 32  # of a large model


def sums_flat(precision: str, zero_stage: int, *, offloads_states: bool, in_fp32: bool) -> bool:
    """Return whether gradients are summed in flat tensors (`deepspeed/flat_optimizer.py`): bf16 below ZeRO-2, and
    float32 at ZeRO-1. Otherwise plain torch, or an optimizer of DeepSpeed, sums them.

    Args:
        in_fp32: whether sums over micro-batches are in float32 (`grad_accum_dtype`); bf16 at ZeRO-1 may have others.
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
