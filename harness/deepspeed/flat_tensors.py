"""The tensors that DeepSpeed's optimizers step on, and where the elements of each parameter lie in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

EngineOptimizer: TypeAlias = Any
"""What an engine steps with: an optimizer of torch, or DeepSpeed's own around one, which has no types."""


@dataclass(frozen=True)
class OneParameter:
    """A parameter that is stepped on itself."""

    tensor: Tensor


@dataclass(frozen=True)
class DividedTogether:
    """This rank's run of a flat tensor that holds parameters one after the other (ZeRO-1, ZeRO-2, bf16).

    Attributes:
        offsets: where each parameter begins in the whole flat tensor.
        group: the ranks, each with a run of equal length.
    """

    tensor: Tensor
    parameters: Sequence[Tensor]
    offsets: Sequence[int]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class DividedOneByOne:
    """This rank's parts of parameters, each divided by itself, one after the other (ZeRO-3)."""

    tensor: Tensor
    parameters: Sequence[Tensor]


SteppedOn: TypeAlias = OneParameter | DividedTogether | DividedOneByOne


def stepped_on(optimizer: EngineOptimizer, chosen: Sequence[int]) -> Iterator[SteppedOn]:
    """Yield the tensors that the parameter groups `chosen` step on; `optimizer` is the engine's."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index, parameters in enumerate(optimizer.fp16_groups):
            if optimizer.sub_group_to_group_id[index] in chosen:
                yield DividedOneByOne(optimizer.fp32_partitioned_groups_flat[index], parameters)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for index in chosen:
            yield DividedTogether(
                optimizer.single_partition_of_fp32_groups[index],
                optimizer.round_robin_bit16_groups[index],
                optimizer.round_robin_bit16_offsets[index],
                optimizer.real_dp_process_group[index],
            )
    elif isinstance(optimizer, BF16_Optimizer):
        for index in chosen:
            parameters = optimizer.bf16_groups[index]
            offsets = [sum(p.numel() for p in parameters[:at]) for at in range(len(parameters))]
            flat, group = optimizer.fp32_groups_flat_partition[index], optimizer.real_dp_process_group[index]
            yield DividedTogether(flat, parameters, offsets, group)
    else:
        for index in chosen:
            yield from map(OneParameter, optimizer.param_groups[index]["params"])
