"""What the arguments of a run say about the things a config may leave "auto", and what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
PARTITIONS = ("balanced", "measured", "uniform", "parameters")
# sizes that the harness itself reads, and the least that each may be; DeepSpeed takes any value for them
LEAST = {
    "/pipeline/stages": 1,
    "/pipeline/activation_checkpoint_interval": 0,
    "/tensor_parallel/autotp_size": 0,
    "/expert_parallel/autoep_size": 1,
}


@dataclass(frozen=True, kw_only=True)
class AutoValues:
    """Arguments by their HuggingFace names and defaults; `given` holds the names that the user set."""

    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    max_steps: int = 1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    global_batch_size: int | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    bf16: bool = False
    fp16: bool = False
    hidden_size: int | None = None
    pipeline_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    world_size: int = 1
    given: frozenset[str] = field(default_factory=frozenset)

    def source(self, name: str) -> str:
        """Where an argument's value comes from, in words."""
        return f"--{name}" if name in self.given else f"default of --{name}"


@dataclass(frozen=True, kw_only=True)
class Filled:
    """One value that was not in the file: where it stands now, what it is, where it came from."""

    pointer: str
    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config without any "auto", ready for DeepSpeed, and what the harness reads from it itself."""

    config: dict[str, Any]  # as DeepSpeed gets it from the harness
    alone: dict[str, Any]  # as DeepSpeed takes it where the harness does not cut the model
    filled: tuple[Filled, ...]
    pp_size: int
    tp_size: int
    dp_size: int
    ep_size: int  # ranks over which whole experts are spread: 1, or as many as tp_size
    micro_batch: int
    accumulation: int
    train_batch: int
    zero_stage: int
    precision: str  # fp32, bf16 or fp16
    partition: str  # balanced, measured, uniform, parameters or type:REGEX
    activation_checkpoint_interval: int  # in decoder layers; 0 is off


def lookup(config: Mapping[str, Any], pointer: str) -> Any:
    """The value at a JSON pointer, or None where there is none."""
    value: Any = config
    for step in pointer.split("/")[1:]:
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return value


def put(config: dict[str, Any], pointer: str, value: Any) -> None:
    """Writes a value at a JSON pointer, making the objects on the way."""
    *steps, last = pointer.split("/")[1:]
    for step in steps:
        config = config.setdefault(step, {})
    config[last] = value


def whole(value: Any) -> int | None:
    """`value` as an int if it is a whole number (5e8 counts, true does not), else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
        return None
    return int(value) if value == int(value) else None


def size_fault(pointer: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with a size that the harness reads, and the remedy; None if it is none of those, or right."""
    least = LEAST.get(pointer)
    if least is None or value == AUTO:
        return None
    number = whole(value)
    if number is not None and number >= least:
        return None
    name = pointer.strip("/").replace("/", ".")
    shown = value if isinstance(value, (int, float)) and not isinstance(value, bool) else json.dumps(value)
    return f"{name} is {shown}, not a whole number of at least {least}", f"write {least} or more" + (
        ", or remove the key" if least else "; 0 is off"
    )


def partition_method(value: Any) -> str | None:
    """The way of cutting that `pipeline.partition` names; None if it names none. `best` is DeepSpeed's default."""
    if value in (None, AUTO, "best"):
        return PARTITIONS[0]
    if not isinstance(value, str):
        return None
    if value.lower() in PARTITIONS:
        return value.lower()
    kind, _, pattern = value.partition(":")
    return value if kind.lower() == "type" and pattern and _is_regex(pattern) else None


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
