"""Where an engine is built, and what it must know of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.arguments import TrainingArguments
from harness.config import Resolved
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
    """

    local_states: bool = False
    draws: bool = True
    example: Value | None = None
