"""The state that an optimizer keeps for the tensors that it steps on: found out, read, and made before its first step.

Which state that is, and of which types, is the optimizer's own affair: torch's AdamW counts steps in a tensor for each
parameter, DeepSpeed's fused one in the parameter group. So it is asked: it makes a step on a few zeros.

With `offload_optimizer.device` nvme, ZeRO-3 writes the float32 weights of a sub-group and their optimizer states to
files after each step, and leaves the tensors empty. To save or load them, they are read back into memory for a while.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.optim import Optimizer

from harness.deepspeed.flat_tensors import EngineOptimizer, SteppedOn
from harness.errors import UserError


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
        for tensor, values in copies:
            tensor.data = values
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


Counter: TypeAlias = Tensor | int | float
"""What an optimizer counts with: a number, or a tensor of one element."""


def torch_optimizer(optimizer: EngineOptimizer) -> Optimizer:
    """Return the optimizer that steps, of the one that an engine has, which may wrap it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


def held_by_optimizer(optimizer: EngineOptimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that an engine's optimizer holds after its first step: its state, and what it steps on in the
    place of `parameters`, as a copy in float32."""
    inner, of_model = torch_optimizer(optimizer), {id(parameter) for parameter in parameters}
    stepped = [tensor for tensor in inner.state if id(tensor) not in of_model]
    states = (value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor))
    return [*stepped, *states]


@dataclass(frozen=True, kw_only=True)
class Template:
    """The state that an optimizer makes for a tensor in its first step.

    Attributes:
        elements: what it keeps for each element, by name, with its dtype.
        counters: what it keeps besides for the tensor: numbers, and tensors of one element.
        of_group: the same for a whole parameter group.
    """

    elements: Mapping[str, torch.dtype]
    counters: Mapping[str, Counter] = field(default_factory=dict)
    of_group: Mapping[str, Counter] = field(default_factory=dict)


def template(optimizer: EngineOptimizer, stepped: SteppedOn) -> Template:
    """Return what the engine's `optimizer` keeps for a tensor that it steps on.

    Raises UserError for an optimizer that keeps tensors of another shape than the parameter's.
    """
    inner = torch_optimizer(optimizer)
    probe = torch.zeros((*(2,) * (stepped.tensor.dim() - 1), 4), dtype=stepped.tensor.dtype).to(stepped.tensor.device)
    probe.requires_grad_().grad = torch.zeros_like(probe)
    group = inner.param_groups[stepped.param_group]
    trial = {**group, "params": [probe], "lr": 0.0}
    state, groups = inner.state, inner.param_groups
    inner.state, inner.param_groups = defaultdict(dict), [trial]
    try:
        # not what the schedule, or the harness, has wrapped around the step, nor its hooks: those would take this for
        # the first step of the run, in which they see which parameters are used
        step: Callable[[Optimizer], object] = type(inner).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]  # torch has wrapped the hooks around it
        step(inner)
        made = dict(inner.state[probe])
    finally:
        inner.state, inner.param_groups = state, groups
    elements = {name: value.dtype for name, value in made.items() if isinstance(value, Tensor) and value.dim() > 0}
    for name in elements:
        if made[name].shape != probe.shape:
            raise UserError(
                f"optimizer {type(inner).__name__} keeps {name}, which does not have one value for each weight: "
                "its state cannot be saved; use another optimizer"
            )
    counters = {name: value for name, value in made.items() if name not in elements and value is not None}
    return Template(
        elements=elements,
        counters=counters,
        of_group={name: value for name, value in trial.items() if name not in group or name == "step"},
    )


def counted(optimizer: EngineOptimizer, stepped: SteppedOn, template: Template) -> dict[str, Counter]:
    """Return the counters that the optimizer keeps for a tensor or its group; none before the first step."""
    inner = torch_optimizer(optimizer)
    state, group = inner.state.get(stepped.tensor, {}), inner.param_groups[stepped.param_group]
    if not state:
        return {}
    found = {name: state[name] for name in template.counters}
    return found | {name: group[name] for name in template.of_group if name in group}


def make_state(
    optimizer: EngineOptimizer, stepped: SteppedOn, template: Template, counters: Mapping[str, float]
) -> None:
    """Give the optimizer state for a tensor as if it had made steps: zeros for each element, and `counters`."""
    inner = torch_optimizer(optimizer)
    state = {name: _set(value, counters.get(name)) for name, value in template.counters.items()}
    for name, dtype in template.elements.items():
        state[name] = torch.zeros_like(stepped.tensor, dtype=dtype, requires_grad=False)
    inner.state[stepped.tensor] = state
    group = inner.param_groups[stepped.param_group]
    group.update({name: _set(value, counters.get(name)) for name, value in template.of_group.items()})


def _set(value: Counter, number: float | None) -> Counter:
    """Return `number` in the form of `value`."""
    if number is None:
        return copy.deepcopy(value)
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


@torch.no_grad()
def use_stepped_on(optimizer: EngineOptimizer) -> None:
    """Bring the values of the tensors that are stepped on to the parameters that the model computes with.

    All ranks call it. Where a parameter is stepped on itself, there is nothing to do.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:  # whole on every rank, so they are made of the new parts
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
