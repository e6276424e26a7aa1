"""Gradients that are a part on each tensor-parallel rank, summed where they arrive.

A parameter that ranks hold alike but use on their own heads, or of which neighbours hold copies, gets a part of its
gradient on each of them. The sum is taken by a hook on the parameter, before anything is accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from harness.parallel.comm import sum_over_group
from harness.parallel.tensor.shard import Shard, shard_of


def sum_gradients(module: nn.Module, names: list[str], reduce: Callable[[Tensor], Tensor]) -> None:
    """Accumulate `reduce(gradient)` instead of the gradients of `module`'s own parameters `names`.

    The parameters are looked up at each forward, so that those which take the place of meta tensors are served too.
    """

    def before_forward(owner: nn.Module, _args: object) -> None:
        for name, param in owner.named_parameters(recurse=False):
            if name in names and param.requires_grad and not sums_gradient(param):
                sum_gradient(param, reduce)

    module.register_forward_pre_hook(before_forward)


def sum_gradient(param: nn.Parameter, reduce: Callable[[Tensor], Tensor]) -> None:
    """Accumulate `reduce(gradient)` instead of the gradient of `param`."""
    # without a gradient where it is put off: see `weight_gradients.py`
    param.register_hook(lambda grad: None if grad is None else reduce(grad))
    param.summed_id = id(param)  # type: ignore[attr-defined]  # an attribute may be copied, a hook is not


def sums_gradient(param: nn.Parameter) -> bool:
    """Whether `param` is served by `sum_gradient`: this very object, not one whose attributes it was given."""
    return getattr(param, "summed_id", None) == id(param)


def sum_gradients_of_copies(module: nn.Module, names: list[str], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of `module`'s own parameters `names` over the ranks that hold the same shards of them.

    It sums the whole gradient over the whole group: no group of its own has to be made for it.
    """
    for name in names:
        shard = shard_of(param) if (param := getattr(module, name)) is not None else None
        if shard is not None:
            sum_gradients(module, [name], partial(_sum_of_copies, shard=shard, group=group))


def _sum_of_copies(grad: Tensor, shard: Shard, group: dist.ProcessGroup | None) -> Tensor:
    full = grad.new_zeros(shard.full_shape)
    shard.put(grad, full)
    return shard.take(sum_over_group(full, group))
