"""ZeRO-3's parameters: what DeepSpeed notes on them, and how it divides them among the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from torch import Tensor, nn
from torch.nn import functional

Partitioned: TypeAlias = Any
"""A parameter to which ZeRO-3 has given attributes and methods of its own (`ds_...`)."""


def is_partitioned(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has divided a tensor among the data-parallel ranks."""
    return hasattr(tensor, "ds_id")


def restore_linear() -> None:
    """Give torch its own `functional.linear` back: the one that ZeRO-3 puts in its place outlasts the engine, rounds
    differently, and cannot take a layer of width zero."""
    functional.linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", functional.linear)


def held_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, partitioned or not; under ZeRO-3 a flat part of it."""
    held: Tensor = getattr(tensor, "ds_tensor", tensor)
    return held


def unpartitioned_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape that a tensor has once ZeRO-3 has gathered it; its own if it is not partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def unpartitioned_size(tensors: Sequence[Partitioned]) -> int:
    """Return how many elements partitioned tensors have in all once they are gathered."""
    return sum(tensor.ds_numel for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How ZeRO-3 has divided one parameter.

    Attributes:
        shape: of the whole parameter.
        total: its elements.
        size: elements that each rank has; the last ones may hold padding.
        group: the ranks.
    """

    shape: tuple[int, ...]
    total: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, parameter: Partitioned) -> Partition:
        """Return how `parameter` is divided; it must be partitioned."""
        return cls(
            shape=tuple(parameter.ds_shape),
            total=parameter.ds_numel,
            size=parameter.partition_numel(),
            group=parameter.ds_process_group,
        )


class PartitionInPlace(deepspeed.zero.Init):
    """`deepspeed.zero.Init` for a module in which each rank has filled its own part of every parameter.

    Without it, rank 0 of the data group would send whole parameters to the others. Raises RuntimeError where DeepSpeed
    does not give each rank an equal run of elements, rounded up.
    """

    parted = 0

    def __init__(self, module: nn.Module, **options: object) -> None:
        whole = sum(not is_partitioned(parameter) for parameter in module.parameters())
        super().__init__(module=module, **options)
        if self.parted != whole:
            raise RuntimeError(f"DeepSpeed {deepspeed.__version__} does not partition parameters one by one")

    def _zero_init_param(self, param: Partitioned) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()
        self.parted += 1
        if param.ds_tensor.ds_numel != -(-param.ds_numel // self.dp_world_size):
            raise RuntimeError(f"DeepSpeed {deepspeed.__version__} partitions parameters in an unknown way")


class GatheredParameters:
    """The parameters that ZeRO-3 gathers, which the micro-batches of a step may share.

    DeepSpeed gathers them for each micro-batch anew, although only the optimizer changes them. They stay where a
    forward ends with all of them gathered in any case, within `stage3_max_live_parameters` and, there and back, within
    `stage3_max_reuse_distance`; not where they come from another device, or from hpZ's second copy.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._stay = False
        if engine.zero_optimization_stage() < 3 or engine.zero_offload_param() or engine.zero_hpz_partition_size() > 1:
            return
        total = unpartitioned_size(list(engine.module.parameters()))
        if total > engine.zero_max_live_parameters() or 2 * total > engine.zero_max_reuse_distance():
            return
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        release = coordinator._PartitionedParameterCoordinator__release_param

        def release_if_done(parameter: Partitioned, free_data: bool = True) -> None:
            if not self._stay:
                release(parameter, free_data)

        coordinator._PartitionedParameterCoordinator__release_param = release_if_done

    @contextmanager
    def staying(self, stay: bool) -> Iterator[None]:
        """Release nothing within this block where `stay`; the last micro-batch of a step must release all."""
        self._stay = stay
        try:
            yield
        finally:
            self._stay = False
