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

from harness.deepspeed.zero3_parameters import Partition

EngineOptimizer: TypeAlias = Any
"""What an engine steps with: an optimizer of torch, or DeepSpeed's own around one, which has no types."""


@dataclass(frozen=True)
class OneParameter:
    """A parameter that is stepped on itself."""

    tensor: Tensor
    param_group: int = 0


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
    param_group: int = 0


@dataclass(frozen=True)
class DividedOneByOne:
    """This rank's parts of parameters, each divided by itself, one after the other (ZeRO-3)."""

    tensor: Tensor
    parameters: Sequence[Tensor]
    param_group: int = 0


SteppedOn: TypeAlias = OneParameter | DividedTogether | DividedOneByOne


@dataclass(frozen=True, kw_only=True)
class Run:
    """The elements of one parameter, one after the other, that lie in a tensor that is stepped on.

    Attributes:
        shape: of the parameter as this rank has it when it is gathered (a tensor-parallel shard, perhaps).
        start: first element of it that is here.
        length: number of its elements that are here; 0 where other ranks have them all.
        offset: where they begin in the tensor.
        group: ranks over which the parameter is spread; None where this rank has all of it.
        split: whether several ranks of `group` have a part of the parameter.
    """

    parameter: Tensor
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    group: dist.ProcessGroup | None = None
    split: bool = False


def runs(stepped: SteppedOn) -> Iterator[Run]:
    """Yield what a tensor that is stepped on holds of each parameter; the same parameters on all ranks of a group."""
    match stepped:
        case OneParameter(tensor=tensor):
            yield Run(parameter=tensor, shape=tuple(tensor.shape), start=0, length=tensor.numel(), offset=0)
        case DividedTogether():
            yield from _divided_together(stepped)
        case DividedOneByOne():
            yield from _divided_one_by_one(stepped)


def _divided_together(stepped: DividedTogether) -> Iterator[Run]:
    size = stepped.tensor.numel()
    first = dist.get_rank(stepped.group) * size
    for parameter, offset in zip(stepped.parameters, stepped.offsets, strict=True):
        begin = min(max(first, offset), offset + parameter.numel())
        end = max(min(first + size, offset + parameter.numel()), begin)
        yield Run(
            parameter=parameter,
            shape=tuple(parameter.shape),
            start=begin - offset,
            length=end - begin,
            offset=begin - first if end > begin else 0,
            group=stepped.group,
            split=offset // size != (offset + parameter.numel() - 1) // size,
        )


def _divided_one_by_one(stepped: DividedOneByOne) -> Iterator[Run]:
    """Every rank has an equal part of each parameter, the last ones perhaps less."""
    offset = 0
    for parameter in stepped.parameters:
        divided = Partition.of(parameter)
        begin = min(dist.get_rank(divided.group) * divided.size, divided.total)
        yield Run(
            parameter=parameter,
            shape=divided.shape,
            start=begin,
            length=min(divided.size, divided.total - begin),
            offset=offset,
            group=divided.group,
            split=dist.get_world_size(divided.group) > 1,
        )
        offset += divided.size


def run_of_each(optimizer: EngineOptimizer) -> Iterator[tuple[Tensor, Run]]:
    """Yield each tensor that is stepped on with what it holds of each parameter; `optimizer` is the engine's."""
    for stepped in stepped_on(optimizer):
        for run in runs(stepped):
            yield stepped.tensor, run


def stepped_on(optimizer: EngineOptimizer, chosen: Sequence[int] | None = None) -> Iterator[SteppedOn]:
    """Yield the tensors that the parameter groups `chosen`, or all, step on; `optimizer` is the engine's."""
    chosen = range(len(optimizer.param_groups)) if chosen is None else chosen
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index, parameters in enumerate(optimizer.fp16_groups):
            if (group := optimizer.sub_group_to_group_id[index]) in chosen:
                yield DividedOneByOne(optimizer.fp32_partitioned_groups_flat[index], parameters, group)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for index in chosen:
            yield DividedTogether(
                optimizer.single_partition_of_fp32_groups[index],
                optimizer.round_robin_bit16_groups[index],
                optimizer.round_robin_bit16_offsets[index],
                optimizer.real_dp_process_group[index],
                index,
            )
    elif isinstance(optimizer, BF16_Optimizer):
        for index in chosen:
            parameters = optimizer.bf16_groups[index]
            offsets = [sum(p.numel() for p in parameters[:at]) for at in range(len(parameters))]
            flat, group = optimizer.fp32_groups_flat_partition[index], optimizer.real_dp_process_group[index]
            yield DividedTogether(flat, parameters, offsets, group, index)
    else:
        for index in chosen:
            for parameter in optimizer.param_groups[index]["params"]:
                yield OneParameter(parameter, index)
