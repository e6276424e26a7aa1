"""Expert parallelism: each rank holds some experts whole, instead of a shard of every expert.

Experts are distributed first over the ranks of a tensor-parallel group, then among neighbours on the data axis.

- Tensor-parallel ranks see the same tokens and compute the same routing, so no token travels: each rank runs its own
  experts on the tokens that are routed to them, and the outputs are summed over the group.
- Neighbours on the data axis see other tokens. These travel to the ranks of their experts
  (`harness.extras.expert_exchange`).

A model's expert-parallel plan names its experts (transformers: `base_model_ep_plan`, merged as `model.ep_plan`). It has
two styles of `transformers.distributed.expert_parallel`: `ep_dispatch_experts` for the module that is called with
(hidden_states, top_k_index, top_k_weights), and `grouped_gemm` for a parameter whose first dimension counts experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from harness.config.model.sharding import Range, shard_range
from harness.errors import UserError
from harness.parallel.comm import Context, TensorParallel, apply, copy_to_group, reduce_from_group
from harness.parallel.plans.plan import STYLES, NoPlan, Plan, PlanRule, plan_for, read_plan_file
from harness.parallel.plans.target import PlanTarget
from harness.parallel.tensor.shard import Shard, cut_parameter
from harness.wording import counted

EXPERTS = "ep_dispatch_experts"
EXPERT_PARAMETER = "grouped_gemm"
T = TypeVar("T")
_ROW_BYTES = 16
_ADVICE = "remove expert_parallel.autoep_size, so that each expert is split"


def expert_parallel_plan(model: PreTrainedModel, plans: Path | None = None, *, tp_size: int = 2) -> Plan:
    """Return the plan of a model whose experts stay whole.

    Rules for experts come from the model's own expert-parallel plan, or else from the part `experts` of the family's
    file in the folder `plans`. Rules for all other layers come from the tensor-parallel plan (`plan_for`). On one
    tensor-parallel rank, or for a family without a tensor-parallel plan, all other layers stay whole.

    Raises UserError for a family without an expert-parallel plan, for an unknown style in it, and for a model without
    experts.
    """
    model_type = model.config.model_type
    own = _expert_rules(model, plans)
    if not any(rule.style == EXPERTS for rule in own.values()):
        raise UserError(f"model type {model_type!r} declares no expert-parallel plan: {_ADVICE}")
    for name, rule in own.items():
        if rule.style not in STYLES | {EXPERTS, EXPERT_PARAMETER}:
            raise UserError(
                f"the expert-parallel plan of model type {model_type!r} has the unknown style {rule.style!r} "
                f"for {name}: {_ADVICE}"
            )
    plan = Plan(model_type=model_type, rules=own)
    found = (plan.rule_of(name) for name, _ in model.named_modules())
    if not any(rule is not None and rule.style == EXPERTS for rule in found):
        raise UserError(f"this {model_type} model has no experts: remove expert_parallel.autoep_size")
    # Only the rules for experts: a family's expert-parallel plan may also shard other layers over tensor-parallel
    # ranks.
    if tp_size == 1:
        return replace(plan, rules={n: rule for n, rule in own.items() if rule.style in (EXPERTS, EXPERT_PARAMETER)})
    with suppress(NoPlan):
        plan = plan_for(model, plans)
    experts = [name for name, rule in own.items() if rule.style == EXPERTS]

    def elsewhere(words: Mapping[str, T]) -> dict[str, T]:
        return {name: word for name, word in words.items() if not _is_in(name, experts)}

    return replace(
        plan, rules=elsewhere(plan.rules) | own, attributes=elsewhere(plan.attributes), inputs=elsewhere(plan.inputs)
    )


def _expert_rules(model: PreTrainedModel, plans: Path | None) -> dict[str, PlanRule]:
    """Return the rules of the model's own expert-parallel plan, or else of its plan file."""
    declared: Mapping[str, str] = getattr(model, "ep_plan", None) or {}
    if declared:
        return {name: PlanRule(style=style) for name, style in declared.items()}
    path = None if plans is None else plans / f"{model.config.model_type}.json"
    return dict(read_plan_file(path, model.config).experts) if path is not None and path.is_file() else {}


def ep_dispatch_experts(target: PlanTarget) -> nn.Module:
    """Make a layer's experts module run only this rank's experts; `cut_experts` shards its parameters.

    The module is still called with hidden states [tokens, width], and indices and weights of experts [tokens, k], and
    still returns the outputs of this rank's tokens, [tokens, width].
    """
    module: Any = target.module
    tensor = target.tensor
    neighbours = target.neighbours
    experts = getattr(module, "num_experts", None)
    ranges = _dealt(experts, target.name, tensor, neighbours.ranks)[tensor.rank]
    # As many as its parameters have, padding included: see `cut_experts`.
    module.num_experts = _widest(ranges)
    run_at_owners = None
    if neighbours.ranks.size > 1 and neighbours.exchange is not None:
        # No module runs early with tensor-parallel ranks: the sum over their outputs would include its output.
        block = target.owner if tensor.size == 1 else None
        width = target.config.hidden_size
        run_at_owners = neighbours.exchange(module, ranges, neighbours, block=block, width=width)
    kind = type(module)

    def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        hidden, index, weights = (*args, *kwargs.values())
        # Each tensor-parallel rank runs only its own experts, so the gradients of both are partial.
        hidden, weights = copy_to_group(hidden, tensor.group), copy_to_group(weights, tensor.group)
        run = partial(kind.forward, self)
        if neighbours.ranks.size > 1:
            # Only a trial on the meta device leaves it out.
            assert run_at_owners is not None
            output = run_at_owners(run, hidden, index, weights)
        else:
            loops = getattr(getattr(self, "config", None), "_experts_implementation", None) == "eager"
            given = _own_routing(hidden, index, weights, own=ranges[0], loops=loops)
            output = _linked(run(*given), given, self)
        return reduce_from_group(output, tensor.group)

    # Makes transformers' kernels skip pairs whose expert is not on this rank. Tokens that travel come only to their
    # experts, so there no pair is to be skipped.
    module._is_expert_parallel = neighbours.ranks.size == 1  # noqa: SLF001
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return target.module


def cut_experts(param: nn.Parameter, target: PlanTarget) -> nn.Parameter:
    """Return this rank's part, [own experts x unit, ...], of a parameter [experts x unit, ...].

    `unit` is `target.unit`. A rank with fewer experts than its neighbours on the data axis is padded with zeros.
    """
    shape = tuple(param.shape)
    unit = target.unit
    tensor = target.tensor
    neighbours = target.neighbours.ranks
    dealt = _dealt(shape[0] // unit, target.name, tensor, neighbours)
    start, stop = dealt[tensor.rank][neighbours.rank]
    shard = Shard(
        full_shape=shape,
        dim=0,
        pieces=((start * unit, stop * unit),),
        # ZeRO fills its buckets in the same way on all data-parallel ranks, so their tensors need one size.
        padding=(_widest(dealt[tensor.rank]) - (stop - start)) * unit,
        widths=tuple((stop - start) * unit for ranges in dealt for start, stop in ranges),
        over_data=neighbours.size > 1,
    )
    return cut_parameter(param, shard)


def run_where_aligned(module: nn.Module, dtype: torch.dtype) -> None:
    """Make transformers run the fused experts in `module` one by one if grouped matrix products would fail."""
    found: list[Any] = [child for child in module.modules() if hasattr(child, "is_concatenated")]
    for experts in found:
        if getattr(experts, "config", None) is not None:
            rows = {size for param in experts.parameters(recurse=False) if param.ndim == 3 for size in param.shape[1:]}
            # Grouped products, transformers' default, need rows of a multiple of 16 bytes.
            if any(row * dtype.itemsize % _ROW_BYTES for row in rows):
                run_experts_by(experts.config, "eager")


def run_experts_by(config: PretrainedConfig, implementation: str | None) -> None:
    """Choose transformers' implementation of fused experts for a config: "grouped_mm" or "eager"."""
    config._experts_implementation = implementation  # noqa: SLF001  # transformers has no public setter for a part


def _own_routing(
    hidden: Tensor, index: Tensor, weights: Tensor, *, own: Range, loops: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of this rank's experts, which are counted from 0."""
    first, stop = own
    elsewhere = (index < first) | (index >= stop)
    # A pair with another rank's expert gets weight 0 and the index after the last expert, which kernels skip. If
    # transformers loops over the experts, it gets expert 0, because the loop of gpt_oss refuses any other index.
    nowhere = 0 if loops else stop - first
    return hidden, torch.where(elsewhere, nowhere, index - first), weights.masked_fill(elsewhere, 0.0)


def _linked(output: Tensor, args: tuple[Tensor, ...], experts: nn.Module) -> Tensor:
    """Return `output` with the experts in its autograd graph, even if no token was routed to this rank's experts."""
    if output.requires_grad or not torch.is_grad_enabled():
        return output
    # All ranks must call the same collectives in the backward, so every rank needs the experts in its graph.
    sources = [tensor for tensor in (*args, *experts.parameters()) if tensor.requires_grad]
    return apply(_Linked, output, *sources) if sources else output


class _Linked(torch.autograd.Function):
    """Forward: return the first tensor. Backward: give the other tensors zero gradients."""

    @staticmethod
    def forward(ctx: Context, output: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return output.clone()

    @staticmethod
    def backward(ctx: Context, _grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def _dealt(experts: int | None, name: str, tensor: TensorParallel, neighbours: TensorParallel) -> list[list[Range]]:
    """Return each rank's experts: `[i][j]` is (first, stop) of tensor-parallel rank i, data neighbour j.

    Raises UserError if `experts` is unknown, or less than the number of ranks.
    """
    if not isinstance(experts, int):
        raise UserError(f"{name} does not have its number of experts (num_experts): {_ADVICE}")
    if experts < tensor.size * neighbours.size:
        raise UserError(
            f"expert_parallel.autoep_size {tensor.size * neighbours.size} does not fit the "
            f"{counted(experts, 'expert')} of {name}: use at most {experts}"
        )
    slots = [shard_range(experts, rank, tensor.size) for rank in range(tensor.size)]
    parts = [
        [shard_range(stop - start, rank, neighbours.size) for rank in range(neighbours.size)] for start, stop in slots
    ]
    return [[(slot[0] + a, slot[0] + b) for a, b in part] for slot, part in zip(slots, parts, strict=True)]


def _widest(ranges: Sequence[Range]) -> int:
    return max(stop - start for start, stop in ranges)


def _is_in(name: str, owners: list[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)
