"""Expert parallelism: each rank of the tensor-parallel group holds some experts whole, instead of a part of every one.

The ranks of the group see the same tokens and compute the same routing, so no token has to travel: each rank runs its
own experts on the tokens that were sent to them, and the outputs are summed over the group. Which modules are experts
stands in the plan that a model declares (transformers: `base_model_ep_plan`, merged as `model.ep_plan`), in
transformers' words (`transformers.distributed.expert_parallel`): `grouped_gemm` for a parameter whose first dimension
counts experts, `ep_dispatch_experts` for the module that is given (hidden_states, top_k_index, top_k_weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from harness.config.model.shares import Stretch, stretch
from harness.errors import UserError
from harness.parallel.comm import Context, TensorParallel, apply, copy_to_group, reduce_from_group
from harness.parallel.plans.plan import STYLES, NoPlan, Plan, PlanRule, plan_for
from harness.parallel.plans.target import PlanTarget
from harness.parallel.tensor.shard import cut_parameter, share_of
from harness.wording import counted

EXPERTS, EXPERT_PARAMETER = "ep_dispatch_experts", "grouped_gemm"
T = TypeVar("T")
_ROW_BYTES = 16
_ADVICE = "remove expert_parallel.autoep_size, so that each expert is split"


def expert_parallel_plan(model: PreTrainedModel, plans: Path | None = None) -> Plan:
    """Return the plan of a transformers model with its experts spread as its own expert-parallel plan says.

    What that says of experts takes the place of all that the tensor-parallel plan (`plan_for`) does with them and
    their parts; of a family without one, the rest stays whole on every rank. Raises UserError for a family that
    declares no expert-parallel plan, and for a style in it that is not known.
    """
    own: Mapping[str, str] = getattr(model, "ep_plan", None) or {}
    model_type = model.config.model_type
    if EXPERTS not in own.values():
        raise UserError(f"model type {model_type!r} declares no expert-parallel plan: {_ADVICE}")
    for name, style in own.items():
        if style not in STYLES | {EXPERTS, EXPERT_PARAMETER}:
            raise UserError(
                f"the expert-parallel plan of model type {model_type!r} has the unknown style {style!r} "
                f"for {name}: {_ADVICE}"
            )
    try:
        plan = plan_for(model, plans)
    except NoPlan:
        plan = Plan(model_type=model_type, rules={})
    experts = [name for name, style in own.items() if style == EXPERTS]

    def elsewhere(words: Mapping[str, T]) -> dict[str, T]:
        return {name: word for name, word in words.items() if not _is_in(name, experts)}

    return replace(
        plan,
        rules=elsewhere(plan.rules) | {name: PlanRule(style=style) for name, style in own.items()},
        attributes=elsewhere(plan.attributes),
        inputs=elsewhere(plan.inputs),
    )


def ep_dispatch_experts(target: PlanTarget) -> nn.Module:
    """Experts of which each rank holds some: it runs those, and the outputs are summed."""
    module: Any = target.module
    tensor = target.tensor
    own = _experts(getattr(module, "num_experts", None), tensor, target.name)
    module.num_experts = own[1] - own[0]
    # transformers' kernels then leave out what is sent to no expert of theirs
    module._is_expert_parallel = True  # noqa: SLF001

    def before_forward(
        _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return _own_routing(*args, **kwargs, own=own, tensor=tensor), {}

    def after_forward(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return reduce_from_group(_linked(output, args, module), tensor.group)

    module.register_forward_pre_hook(before_forward, with_kwargs=True)
    module.register_forward_hook(after_forward)
    return target.module


def cut_experts(param: nn.Parameter, name: str, tensor: TensorParallel) -> nn.Parameter:
    """Return this rank's experts of a parameter that holds all of them along its first dimension."""
    shape = tuple(param.shape)
    _experts(shape[0], tensor, name)
    return cut_parameter(param, share_of(shape, 0, tensor.rank, tensor.size))


def run_where_aligned(module: nn.Module, dtype: torch.dtype) -> None:
    """Let the fused experts in `module` that grouped matrix products cannot take run one after the other.

    Those products (transformers' default) want rows of whole 16 bytes, also of experts that are not cut.
    """
    found: list[Any] = [child for child in module.modules() if hasattr(child, "is_concatenated")]
    for experts in found:
        if getattr(experts, "config", None) is not None:
            rows = {size for param in experts.parameters(recurse=False) if param.ndim == 3 for size in param.shape[1:]}
            if any(row * dtype.itemsize % _ROW_BYTES for row in rows):
                run_experts_by(experts.config, "eager")


def run_experts_by(config: PretrainedConfig, implementation: str | None) -> None:
    """Let the fused experts of the model with this config run by one of transformers' implementations."""
    config._experts_implementation = implementation  # noqa: SLF001  # transformers has no public setter for a part


def _own_routing(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, own: Stretch, tensor: TensorParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what this rank's `own` experts are given: others get the index after the last, which is no expert, and
    weight 0.

    Each rank makes a part of the gradients of hidden states and weights: they are summed over the group.
    """
    hidden_states, top_k_weights = (
        copy_to_group(hidden_states, tensor.group),
        copy_to_group(top_k_weights, tensor.group),
    )
    first, stop = own
    elsewhere = (top_k_index < first) | (top_k_index >= stop)
    index = torch.where(elsewhere, stop - first, top_k_index - first)
    return hidden_states, index, top_k_weights.masked_fill(elsewhere, 0.0)


def _linked(output: Tensor, args: tuple[Tensor, ...], experts: nn.Module) -> Tensor:
    """`output`, in the graph even where no token came to this rank and a loop over experts touched nothing.

    The other ranks sum gradients with this one, so its backward must pass the same places.
    """
    if output.requires_grad or not torch.is_grad_enabled():
        return output
    sources = [tensor for tensor in (*args, *experts.parameters()) if tensor.requires_grad]
    return apply(_Linked, output, *sources) if sources else output


class _Linked(torch.autograd.Function):
    """Forward: the first tensor. Backward: zeros for the others."""

    @staticmethod
    def forward(ctx: Context, output: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return output.clone()

    @staticmethod
    def backward(ctx: Context, _grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def _experts(experts: int | None, tensor: TensorParallel, name: str) -> Stretch:
    """Return this rank's experts. Raises UserError where the module does not count them, or they are fewer than the
    ranks."""
    if not isinstance(experts, int):
        raise UserError(f"{name} does not have its number of experts (num_experts): {_ADVICE}")
    if experts < tensor.size:
        raise UserError(
            f"expert_parallel.autoep_size {tensor.size} does not fit the {counted(experts, 'expert')} of {name}: "
            f"use at most {experts}"
        )
    return stretch(experts, tensor.rank, tensor.size)


def _is_in(name: str, owners: list[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)
