"""What DeepSpeed keeps on NVMe between steps, in memory for a while: to be saved, or to be loaded.

With `offload_optimizer.device` nvme, ZeRO-3 writes the float32 weights of a sub-group and what the optimizer keeps for
them to files after each step. The tensors are then empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from harness.deepspeed.flat_tensors import EngineOptimizer


def sub_groups_on_nvme(optimizer: EngineOptimizer) -> list[int]:
    """Return the indices of the sub-groups that lie on NVMe between steps; a small one stays in memory."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) or not optimizer.swap_optimizer:
        return []
    return [index for index in range(len(optimizer.fp16_groups)) if optimizer._swappable_optimizer_subgroup(index)]


@contextmanager
def states_in_memory(optimizer: EngineOptimizer, *, changed: bool = False) -> Iterator[None]:
    """Hold what lies on NVMe in memory, in new tensors that views of them outlive; nothing happens without NVMe.

    Args:
        changed: write the values back at the end, those of states that were put in the place of others too.
    """
    indices = sub_groups_on_nvme(optimizer)
    for index in indices:
        optimizer._optimizer_states_and_gradient_swap_in(index)
        copies = [(tensor, tensor.data.clone()) for tensor in _swapped(optimizer, index)]
        optimizer._release_swap_buffers(index)
        for tensor, copy in copies:
            tensor.data = copy
    yield
    if changed and indices:
        optimizer.optimizer_swapper.purge_state()  # it asks the optimizer anew which tensors it keeps
    for index in indices:
        if changed:
            _write_back(optimizer, index)
        for tensor in _swapped(optimizer, index):
            tensor.data = torch.empty(0, dtype=tensor.dtype)


def _write_back(optimizer: EngineOptimizer, index: int) -> None:
    """Write the tensors of a sub-group to their files; those of states may not exist yet."""
    flat, states = optimizer.fp32_partitioned_groups_flat[index], optimizer.optimizer.state
    values, kept = flat.data, states.pop(flat, None)
    optimizer._optimizer_states_and_gradient_swap_in(index)  # into a pinned buffer, which DeepSpeed writes from
    flat.data.copy_(values)
    if kept is not None:
        states[flat] = kept
    optimizer._optimizer_states_and_gradient_swap_out(index)


def _swapped(optimizer: EngineOptimizer, index: int) -> list[Tensor]:
    """Return the tensors of a sub-group that DeepSpeed writes to files: those with a value for each element."""
    flat: Tensor = optimizer.fp32_partitioned_groups_flat[index]
    kept = optimizer.optimizer.state.get(flat, {}).values()
    return [flat, *(value for value in kept if isinstance(value, Tensor) and value.dim() > 0)]
