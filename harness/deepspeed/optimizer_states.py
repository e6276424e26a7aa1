"""Discover, read and create an optimizer's state for the tensors that it updates.

Optimizers differ in their state: torch's classes count steps in a tensor per parameter, DeepSpeed's fused ones in the
parameter group. To discover it, the optimizer makes one trial step on a few zeros.

With `offload_optimizer.device` nvme, ZeRO-3 writes a sub-group's float32 weights and optimizer states to files after
each step, and leaves the tensors empty. To save or load them, they are temporarily read back into memory.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.optim import Optimizer

from harness.deepspeed.flat_tensors import EngineOptimizer, UpdatedTensor
from harness.errors import UserError

Counter: TypeAlias = Tensor | int | float
"""A step counter or similar: a number or a tensor of one element."""
_STORED_AS = {"DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}}
"""States whose name in DeepSpeed differs from torch's; checkpoints use torch's name."""


def sub_groups_on_nvme(optimizer: EngineOptimizer) -> list[int]:
    """Return the indices of the sub-groups on NVMe between steps; small ones stay in memory."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) or not optimizer.swap_optimizer:
        return []
    return [index for index in range(len(optimizer.fp16_groups)) if optimizer._swappable_optimizer_subgroup(index)]


@contextmanager
def states_in_memory(optimizer: EngineOptimizer, *, changed: bool = False) -> Iterator[None]:
    """In this context, hold the sub-groups on NVMe in memory; do nothing without NVMe.

    Args:
        changed: write the values back at the end, including states that have replaced others.
    """
    indices = sub_groups_on_nvme(optimizer)
    for index in indices:
        optimizer._optimizer_states_and_gradient_swap_in(index)
        # In new tensors, not in DeepSpeed's swap buffers, so views of them stay valid after the context.
        copies = [(tensor, tensor.data.clone()) for tensor in _swapped(optimizer, index)]
        optimizer._release_swap_buffers(index)
        for tensor, values in copies:
            tensor.data = values
    yield
    if changed and indices:
        # The swapper remembers the tensors; states may have been replaced since, so it must collect them again.
        optimizer.optimizer_swapper.purge_state()
    for index in indices:
        if changed:
            _write_back(optimizer, index)
        for tensor in _swapped(optimizer, index):
            tensor.data = torch.empty(0, dtype=tensor.dtype)


def _write_back(optimizer: EngineOptimizer, index: int) -> None:
    flat = optimizer.fp32_partitioned_groups_flat[index]
    states = optimizer.optimizer.state
    # DeepSpeed writes from a pinned buffer, which swapping in allocates. Remove the states meanwhile: a fresh
    # optimizer's states have no file yet, but would be read from one.
    values = flat.data
    kept = states.pop(flat, None)
    optimizer._optimizer_states_and_gradient_swap_in(index)
    flat.data.copy_(values)
    if kept is not None:
        states[flat] = kept
    optimizer._optimizer_states_and_gradient_swap_out(index)


def _swapped(optimizer: EngineOptimizer, index: int) -> list[Tensor]:
    """Return the tensors of a sub-group that DeepSpeed writes to files: the flat weights, and states of their size."""
    flat: Tensor = optimizer.fp32_partitioned_groups_flat[index]
    kept = optimizer.optimizer.state.get(flat, {}).values()
    return [flat, *(value for value in kept if isinstance(value, Tensor) and value.dim() > 0)]


def torch_optimizer(optimizer: EngineOptimizer) -> Optimizer:
    """Return the torch optimizer inside an engine's optimizer, which may wrap it several times."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


@dataclass(frozen=True, kw_only=True)
class StateTemplate:
    """The state that an optimizer creates for a tensor in its first step.

    Attributes:
        elements: dtype of each state of the tensor's own shape, by name (`exp_avg`).
        counters: the tensor's other states, by name (`step`): numbers, and tensors of one element.
        of_group: counters that the optimizer keeps once for the whole parameter group.
    """

    elements: Mapping[str, torch.dtype]
    counters: Mapping[str, Counter] = field(default_factory=dict)
    of_group: Mapping[str, Counter] = field(default_factory=dict)


def template(optimizer: EngineOptimizer, updated: UpdatedTensor) -> StateTemplate:
    """Return the state that the engine's `optimizer` keeps for a tensor that it updates.

    Raises UserError for an optimizer with states of another shape than the parameter's.
    """
    inner = torch_optimizer(optimizer)
    # As many dimensions as the tensor, because optimizers may treat matrices differently. No size is 1, and the last
    # differs, so neither a counter nor a state per row or column has the probe's shape. Values and rate do not matter.
    probe = torch.zeros((*(2,) * (updated.tensor.dim() - 1), 4), dtype=updated.tensor.dtype).to(updated.tensor.device)
    probe.requires_grad_().grad = torch.zeros_like(probe)
    group = inner.param_groups[updated.param_group]
    trial = {**group, "params": [probe], "lr": 0.0}
    state = inner.state
    groups = inner.param_groups
    inner.state = defaultdict(dict)
    inner.param_groups = [trial]
    try:
        # The bare step of the class, without hooks and wrappers of the learning-rate scheduler and the harness: these
        # would take it for the first step of the run, which shows the used parameters.
        step: Callable[[Optimizer], object] = type(inner).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]  # torch has wrapped the hooks around it
        step(inner)
        made = dict(inner.state[probe])
    finally:
        inner.state = state
        inner.param_groups = groups
    elements = {name: value.dtype for name, value in made.items() if isinstance(value, Tensor) and value.dim() > 0}
    for name in elements:
        if made[name].shape != probe.shape:
            raise UserError(
                f"optimizer {type(inner).__name__} keeps {name}, which does not have one value for each weight: "
                "its state cannot be saved; use another optimizer"
            )
    counters = {name: value for name, value in made.items() if name not in elements and value is not None}
    return StateTemplate(
        elements=elements,
        counters=counters,
        of_group={name: value for name, value in trial.items() if name not in group or name == "step"},
    )


def stored_names(optimizer: EngineOptimizer, template: StateTemplate) -> dict[str, str]:
    """Return checkpoint name -> optimizer's name of each state with one value per weight."""
    other = _STORED_AS.get(type(torch_optimizer(optimizer)).__name__, {})
    return {other.get(name, name): name for name in template.elements}


def counters_of(optimizer: EngineOptimizer, updated: UpdatedTensor, template: StateTemplate) -> dict[str, Counter]:
    """Return the optimizer's counters for a tensor and its group, by name; empty before the first step."""
    inner = torch_optimizer(optimizer)
    state = inner.state.get(updated.tensor, {})
    if not state:
        return {}
    group = inner.param_groups[updated.param_group]
    found = {name: state[name] for name in template.counters}
    return found | {name: group[name] for name in template.of_group if name in group}


def make_state(
    optimizer: EngineOptimizer, updated: UpdatedTensor, template: StateTemplate, counters: Mapping[str, float]
) -> None:
    """Create the optimizer's state for a tensor as if it had made steps, with zeros and `counters`."""
    inner = torch_optimizer(optimizer)
    state = {name: _set(value, counters.get(name)) for name, value in template.counters.items()}
    for name, dtype in template.elements.items():
        state[name] = torch.zeros_like(updated.tensor, dtype=dtype, requires_grad=False)
    inner.state[updated.tensor] = state
    group = inner.param_groups[updated.param_group]
    group.update({name: _set(value, counters.get(name)) for name, value in template.of_group.items()})


def _set(value: Counter, number: float | None) -> Counter:
    """Return `number` as the type of `value`, a tensor or a number; a copy of `value` for None."""
    if number is None:
        return copy.deepcopy(value)
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


@torch.no_grad()
def copy_to_model_parameters(optimizer: EngineOptimizer) -> None:
    """Copy the tensors that the optimizer updates to the parameters that the model uses.

    All ranks must call it, as ZeRO gathers the parameters. Does nothing if the optimizer updates parameters directly.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        # An evaluation leaves parameters gathered: they would keep the old values.
        optimizer.empty_partition_cache()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        # Small ones, which every rank keeps whole.
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
