"""The keys that set a run's layout, their smallest values, and the names of partition methods."""

from __future__ import annotations

import json
import re

from harness.config.values.pointers import AUTO, name_of, whole
from harness.schedules import DEFAULT, SCHEDULES

PARTITIONS = ("balanced", "measured", "uniform", "parameters")
PARTITION_FORMS = (*PARTITIONS, "type:REGEX")
INDUCTOR = "inductor"
"""The default backend of torch.compile."""
CHUNKS = "/pipeline/chunks_per_stage"
TENSOR = "/tensor_parallel/autotp_size"
CONTEXT = "/context_parallel/size"
DEEPSPEED_CONTEXT = "/sequence_parallel_size"
"""DeepSpeed's key of the context-parallel size, with the same meaning as CONTEXT."""
LOSS_TILE = "/tiling/loss"
FEED_FORWARD_TILE = "/tiling/feed_forward"
ATTENTION_TILE = "/tiling/attention"
"""Number of tokens that the loss, feed-forward blocks and norms, or attention compute at a time; 0 is all."""
GRADIENT_BITS = "/gradient_compression/bits"
ONE_REDUCTION = "/gradient_reduction/once_per_step"
EXPERTS = "/expert_parallel"
TOKEN_PIECES = "/expert_parallel/token_pieces"
# Sizes that the harness itself reads, with their smallest values: DeepSpeed accepts any value for them.
LEAST = {
    "/pipeline/stages": 1,
    CHUNKS: 1,
    "/pipeline/activation_checkpoint_interval": 0,
    CONTEXT: 1,
    LOSS_TILE: 0,
    FEED_FORWARD_TILE: 0,
    ATTENTION_TILE: 0,
    TENSOR: 0,
    "/expert_parallel/autoep_size": 1,
    TOKEN_PIECES: 1,
}


def size_fault(pointer: str, value: object) -> tuple[str, str] | None:
    """Return (fault, remedy) of a size that the harness reads; None for other keys and for valid sizes."""
    least = LEAST.get(pointer)
    if least is None or value == AUTO:
        return None
    number = whole(value)
    if number is not None and number >= least:
        return None
    shown = value if isinstance(value, (int, float)) and not isinstance(value, bool) else json.dumps(value)
    return f"{name_of(pointer)} is {shown}, not a whole number of at least {least}", f"write {least} or more" + (
        ", or remove the key" if least else "; 0 is off"
    )


def expert_fault(ep_size: int, tp_size: int, dp_size: int | None) -> tuple[str, str] | None:
    """Return why whole experts cannot be distributed over `ep_size` ranks of a stage, and the remedy; None if they can.

    `dp_size` may be None (unknown).
    """
    neighbours, left_over = divmod(ep_size, tp_size)
    if ep_size == 1 or (not left_over and (dp_size is None or dp_size % neighbours == 0)):
        return None
    ranks = f"tensor-parallel size {tp_size}"
    if dp_size is None:
        return f"expert-parallel size {ep_size} is not a multiple of {ranks}", f"set autoep_size to 1 or {tp_size}"
    fits = [tp_size * size for size in range(1, dp_size + 1) if dp_size % size == 0 and tp_size * size > 1]
    return (
        f"expert-parallel size {ep_size} does not fit {ranks} x data-parallel size {dp_size}",
        f"set autoep_size to {' or '.join(map(str, [1, *fits]))}",
    )


def partition_method(value: object) -> str | None:
    """Return the method named by `pipeline.partition`; None if it is invalid. `best` is DeepSpeed's default."""
    if value in (None, AUTO, "best"):
        return PARTITIONS[0]
    if not isinstance(value, str):
        return None
    if value.lower() in PARTITIONS:
        return value.lower()
    kind, _, pattern = value.partition(":")
    return value if kind.lower() == "type" and pattern and is_regex(pattern) else None


def schedule_name(value: object) -> str | None:
    """Return the schedule named by `pipeline.schedule`; None if it is invalid."""
    if value in (None, AUTO):
        return DEFAULT
    return value.lower() if isinstance(value, str) and value.lower() in SCHEDULES else None


def is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
