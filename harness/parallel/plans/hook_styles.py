"""Styles of a tensor-parallel plan that leave a module whole, and cut or join what goes in and what comes out.

Each takes the `PlanTarget` and returns its module, with hooks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from harness.parallel.comm import (
    copy_tail_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from harness.parallel.plans.target import PlanTarget
from harness.parallel.tensor.summed_gradients import GradientSum, sum_gradients


def replicated_with_grad_allreduce(target: PlanTarget) -> nn.Module:
    """Sum the gradients of a module that every rank holds whole and applies to its own heads."""
    for module in target.module.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            sum_gradients(module, names, GradientSum(target.tensor.group))
    return target.module


def moe_tp_experts(target: PlanTarget) -> nn.Module:
    """Experts of which each rank holds a part of every one: what goes in is whole, what comes out is
    summed."""
    group = target.tensor.group

    def before_forward(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return tuple(_copied(x, group) for x in args), {name: _copied(x, group) for name, x in kwargs.items()}

    target.module.register_forward_pre_hook(before_forward, with_kwargs=True)
    return all_reduce(target)


def moe_identity_expert(target: PlanTarget) -> nn.Module:
    """Divide the output of an expert that returns its input, alike on every rank, where experts' outputs are summed."""
    target.module.register_forward_hook(lambda _module, _args, output: output / target.tensor.size)
    return target.module


def gather_input(target: PlanTarget) -> nn.Module:
    """Gather the inputs and split the output of a module that needs the whole width (a norm over all heads)."""
    group, widths = target.tensor.group, target.widths(target.module.get_parameter("weight").shape[-1])
    target.module.register_forward_pre_hook(
        lambda _module, args: tuple(gather_from_group(x, group, widths) for x in args)
    )
    target.module.register_forward_hook(lambda _module, _args, output: split_to_group(output, group, widths))
    return target.module


def copy_input(target: PlanTarget) -> nn.Module:
    """Sum the input's gradients for an owner of split parameters, of which each rank makes its part of the output."""
    group = target.tensor.group
    target.module.register_forward_pre_hook(lambda _module, args: tuple(_copied(x, group) for x in args))
    return target.module


def mla_kv_a_proj(target: PlanTarget) -> nn.Module:
    """Return a whole projection whose output is two: one that a split layer takes in, and `qk_rope_head_dim` rotary
    values that go to each rank's own heads, so that their gradients are summed (DeepSeek-V2, arXiv
    2405.04434, section 2.1).
    """
    tail, group = target.config.qk_rope_head_dim, target.tensor.group
    target.module.register_forward_hook(lambda _module, _args, output: copy_tail_to_group(output, tail, group))
    return target.module


def all_reduce(target: PlanTarget) -> nn.Module:
    """Sum the output of a module, which is partial on each rank."""
    group = target.tensor.group
    target.module.register_forward_hook(lambda _module, _args, output: reduce_from_group(output, group))
    return target.module


def local_params(target: PlanTarget) -> nn.Module:
    """Leave a module as it is whose parameters are split by rules of their own: its forward uses this rank's parts."""
    return target.module


def replicate(target: PlanTarget) -> nn.Module:
    """Leave a module as it is that every rank holds whole and applies to the same input."""
    return target.module


def _copied(x: object, group: dist.ProcessGroup | None) -> object:
    return copy_to_group(x, group) if isinstance(x, Tensor) and x.requires_grad else x
