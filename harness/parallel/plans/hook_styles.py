"""Styles of a tensor-parallel plan that leave a module whole, and cut or join what goes in and what comes out.

Each takes the `PlanTarget` and returns its module, with hooks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from harness.parallel.comm import (
    copy_tail_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
    sum_over_group,
)
from harness.parallel.plans.target import PlanTarget
from harness.parallel.tensor.summed_gradients import sum_gradients


def replicated_with_grad_allreduce(site: PlanTarget) -> nn.Module:
    """A module that every rank holds whole but applies to its own heads: its gradients are summed."""
    for module in site.module.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            sum_gradients(module, names, lambda grad: sum_over_group(grad, site.tensor.group))
    return site.module


def moe_tp_experts(site: PlanTarget) -> nn.Module:
    """Experts of which each rank holds a part of every one: what goes in is whole, what comes out is
    summed."""
    group = site.tensor.group

    def before_forward(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(_copied(x, group) for x in args), {name: _copied(x, group) for name, x in kwargs.items()}

    site.module.register_forward_pre_hook(before_forward, with_kwargs=True)
    return all_reduce(site)


def moe_identity_expert(site: PlanTarget) -> nn.Module:
    """An expert that returns its input, on every rank alike, where the experts' outputs are summed: it gives
    a share."""
    site.module.register_forward_hook(lambda _module, _args, output: output / site.tensor.size)
    return site.module


def gather_input(site: PlanTarget) -> nn.Module:
    """A module that needs the whole width (a norm over all heads), between layers that are split: its split inputs are
    gathered, its output is split again."""
    group, widths = site.tensor.group, site.widths(site.module.weight.shape[-1])
    site.module.register_forward_pre_hook(
        lambda _module, args: tuple(gather_from_group(x, group, widths) for x in args)
    )
    site.module.register_forward_hook(lambda _module, _args, output: split_to_group(output, group, widths))
    return site.module


def copy_input(site: PlanTarget) -> nn.Module:
    """The owner of split parameters, of which each rank makes its part of the output from the whole input."""
    group = site.tensor.group
    site.module.register_forward_pre_hook(lambda _module, args: tuple(_copied(x, group) for x in args))
    return site.module


def mla_kv_a_proj(site: PlanTarget) -> nn.Module:
    """A whole projection whose output is two: one that a split layer takes in, and `qk_rope_head_dim` rotary
    values that go to each rank's own heads, so that their gradients are summed (DeepSeek-V2, arXiv
    2405.04434, section 2.1).
    """
    tail, group = site.config.qk_rope_head_dim, site.tensor.group
    site.module.register_forward_hook(lambda _module, _args, output: copy_tail_to_group(output, tail, group))
    return site.module


def all_reduce(site: PlanTarget) -> nn.Module:
    """A module whose output, partial on each rank, is summed."""
    group = site.tensor.group
    site.module.register_forward_hook(lambda _module, _args, output: reduce_from_group(output, group))
    return site.module


def local_params(site: PlanTarget) -> nn.Module:
    """The owner of parameters that rules of their own cut: its forward uses this rank's parts as they are."""
    return site.module


def replicate(site: PlanTarget) -> nn.Module:
    """A module that every rank holds whole and applies to the same input: nothing to do."""
    return site.module


def _copied(x: Any, group: Any) -> Any:
    return copy_to_group(x, group) if isinstance(x, Tensor) and x.requires_grad else x
