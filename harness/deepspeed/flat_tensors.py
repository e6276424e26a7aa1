"""The tensors that DeepSpeed's optimizers update, and where the elements of each parameter lie in them.

ZeRO and the bf16 optimizer update flat float32 tensors in place of the parameters, and copy the values back. To save
or change the state of one parameter, its elements must be found in these tensors.
"""

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
"""The optimizer of an engine: a torch one, or DeepSpeed's wrapper around one, which has no types."""


@dataclass(frozen=True)
class WholeParameter:
    """A parameter that the optimizer updates directly."""

    tensor: Tensor
    param_group: int = 0


@dataclass(frozen=True)
class FlatPartition:
    """This rank's slice of a flat tensor that holds parameters one after the other (ZeRO-1, ZeRO-2, bf16).

    Attributes:
        tensor: the slice, flat.
        offsets: index of each parameter's first element in the whole flat tensor.
        group: the ranks, each with a slice of equal length.
    """

    tensor: Tensor
    parameters: Sequence[Tensor]
    offsets: Sequence[int]
    group: dist.ProcessGroup
    param_group: int = 0


@dataclass(frozen=True)
class PerParameterPartition:
    """This rank's part of each parameter, one after the other in a flat tensor (ZeRO-3 divides each by itself)."""

    tensor: Tensor
    parameters: Sequence[Tensor]
    param_group: int = 0


UpdatedTensor: TypeAlias = WholeParameter | FlatPartition | PerParameterPartition


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Consecutive elements of one parameter in a tensor that the optimizer updates.

    Attributes:
        shape: of the whole parameter on this rank, once gathered (under tensor parallelism, of the shard).
        start: index of the first of them in the flattened parameter.
        length: number of elements stored on this rank (may be 0).
        offset: index of the first of them in the tensor.
        group: ranks over which the parameter is divided; None if this rank has all of it.
        split: whether several ranks of `group` have a part of the parameter.
    """

    parameter: Tensor
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    group: dist.ProcessGroup | None = None
    split: bool = False


def parameter_slices(updated: UpdatedTensor) -> Iterator[ParameterSlice]:
    """Yield the slice of each parameter in a tensor that the optimizer updates.

    All ranks of a group yield the same parameters in the same order, so collectives may follow; a slice may be empty.
    """
    match updated:
        case WholeParameter(tensor=tensor):
            yield ParameterSlice(parameter=tensor, shape=tuple(tensor.shape), start=0, length=tensor.numel(), offset=0)
        case FlatPartition():
            yield from _flat_partition_slices(updated)
        case PerParameterPartition():
            yield from _per_parameter_slices(updated)


def _flat_partition_slices(updated: FlatPartition) -> Iterator[ParameterSlice]:
    size = updated.tensor.numel()
    first = dist.get_rank(updated.group) * size
    for parameter, offset in zip(updated.parameters, updated.offsets, strict=True):
        # clamped to the parameter: if this rank's slice has none of it, `begin` is `end`, and the slice is empty
        begin = min(max(first, offset), offset + parameter.numel())
        end = max(min(first + size, offset + parameter.numel()), begin)
        yield ParameterSlice(
            parameter=parameter,
            shape=tuple(parameter.shape),
            start=begin - offset,
            length=end - begin,
            offset=begin - first if end > begin else 0,
            group=updated.group,
            # the first and the last element belong to different ranks
            split=offset // size != (offset + parameter.numel() - 1) // size,
        )


def _per_parameter_slices(updated: PerParameterPartition) -> Iterator[ParameterSlice]:
    """Yield slices of equal length on all ranks; on the last ranks they may be shorter, and padded in the tensor."""
    offset = 0
    for parameter in updated.parameters:
        divided = Partition.of(parameter)
        begin = min(dist.get_rank(divided.group) * divided.size, divided.total)
        yield ParameterSlice(
            parameter=parameter,
            shape=divided.shape,
            start=begin,
            length=min(divided.size, divided.total - begin),
            offset=offset,
            group=divided.group,
            split=dist.get_world_size(divided.group) > 1,
        )
        offset += divided.size


def updated_tensors(optimizer: EngineOptimizer, chosen: Sequence[int] | None = None) -> Iterator[UpdatedTensor]:
    """Yield the tensors that `optimizer`, the engine's, updates for the parameter groups `chosen`, or for all."""
    chosen = range(len(optimizer.param_groups)) if chosen is None else chosen
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        # ZeRO-3's `fp16_groups` are sub-groups of at most `sub_group_size` elements, in any dtype.
        for index, parameters in enumerate(optimizer.fp16_groups):
            if (group := optimizer.sub_group_to_group_id[index]) in chosen:
                yield PerParameterPartition(optimizer.fp32_partitioned_groups_flat[index], parameters, group)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        # "round robin" is DeepSpeed's name for the memory order, even if `round_robin_gradients` is off.
        for index in chosen:
            yield FlatPartition(
                optimizer.single_partition_of_fp32_groups[index],
                optimizer.round_robin_bit16_groups[index],
                optimizer.round_robin_bit16_offsets[index],
                optimizer.real_dp_process_group[index],
                index,
            )
    elif isinstance(optimizer, BF16_Optimizer):
        for index in chosen:
            parameters = optimizer.bf16_groups[index]
            # Without gaps: DeepSpeed pads the flat tensor only after the last parameter.
            offsets = [sum(p.numel() for p in parameters[:at]) for at in range(len(parameters))]
            flat = optimizer.fp32_groups_flat_partition[index]
            yield FlatPartition(flat, parameters, offsets, optimizer.real_dp_process_group[index], index)
    else:
        for index in chosen:
            for parameter in optimizer.param_groups[index]["params"]:
                yield WholeParameter(parameter, index)
