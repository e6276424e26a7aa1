"""ZeRO-3's parameters: DeepSpeed's attributes on them, and their partitioning over data-parallel ranks."""

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
    """Return whether ZeRO-3 has partitioned a tensor over the data-parallel ranks."""
    return hasattr(tensor, "ds_id")


def restore_linear() -> None:
    """Restore torch's `functional.linear`."""
    # ZeRO-3's replacement outlives the engine, rounds differently, and fails on a layer of width zero.
    functional.linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", functional.linear)


def held_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a flat partition [n] under ZeRO-3, else the tensor."""
    held: Tensor = getattr(tensor, "ds_tensor", tensor)
    return held


def unpartitioned_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor when gathered by ZeRO-3; its own if it is not partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def unpartitioned_size(tensors: Sequence[Partitioned]) -> int:
    """Return the total number of elements of partitioned tensors when gathered."""
    return sum(tensor.ds_numel for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """ZeRO-3's partitioning of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        total: number of elements of the whole parameter.
        size: number of elements on each rank, with padding on the last ranks.
        group: the ranks that it is partitioned over.
    """

    shape: tuple[int, ...]
    total: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, parameter: Partitioned) -> Partition:
        """Return the partitioning of `parameter`, which must be partitioned."""
        return cls(
            shape=tuple(parameter.ds_shape),
            total=parameter.ds_numel,
            size=parameter.partition_numel(),
            group=parameter.ds_process_group,
        )

    @property
    def start(self) -> int:
        """Index of this rank's first element."""
        # The last ranks may hold only padding.
        return min(dist.get_rank(self.group) * self.size, self.total)


def held_values(tensor: Tensor) -> Tensor:
    """Return this rank's values of a tensor: flat [n], without padding, if ZeRO-3 has partitioned it."""
    held = held_tensor(tensor).detach()
    if not is_partitioned(tensor):
        return held
    divided = Partition.of(tensor)
    # DeepSpeed leaves the padding of the last ranks uninitialised.
    return held.view(-1)[: divided.total - divided.start]


class PartitionInPlace(deepspeed.zero.Init):
    """`deepspeed.zero.Init` for a module in which each rank has already filled its own partitions.

    DeepSpeed's own would broadcast whole parameters from rank 0 of the data-parallel group. Raises RuntimeError if
    DeepSpeed does not give each rank an equal number of consecutive elements, rounded up.
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
    """Keeps ZeRO-3's parameters gathered between the micro-batches of a step.

    DeepSpeed gathers them again for each micro-batch, although only the optimizer changes them. They are kept only if a
    forward pass ends with all of them gathered anyway, so that this takes no memory: their number is within
    `stage3_max_live_parameters`, and twice it (forward and backward) within `stage3_max_reuse_distance`. Offloaded
    parameters, and parameters gathered from hpZ's secondary copy, are not kept.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._stay = False
        if engine.zero_optimization_stage() < 3 or engine.zero_offload_param() or engine.zero_hpz_partition_size() > 1:
            return
        # A smaller limit makes DeepSpeed release parameters within a pass, and keeping them would take more memory.
        total = unpartitioned_size(list(engine.module.parameters()))
        if total > engine.zero_max_live_parameters() or 2 * total > engine.zero_max_reuse_distance():
            return
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        # A private method of the class, hence the mangled name.
        release = coordinator._PartitionedParameterCoordinator__release_param

        def release_if_done(parameter: Partitioned, free_data: bool = True) -> None:
            if not self._stay:
                release(parameter, free_data)

        coordinator._PartitionedParameterCoordinator__release_param = release_if_done

    @contextmanager
    def staying(self, stay: bool) -> Iterator[None]:
        """Release no parameter in this context if `stay`; it must be False for the last micro-batch of a step."""
        self._stay = stay
        try:
            yield
        finally:
            self._stay = False
