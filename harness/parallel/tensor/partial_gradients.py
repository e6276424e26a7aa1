"""Sum partial gradients, of which each tensor-parallel rank computes only one summand.

Between a column-parallel and a row-parallel layer, a rank computes only its own heads or columns. A parameter that is
used there but not sharded (a norm over one head, a parameter of an activation), or whose shard neighbouring ranks also
hold, gets only a partial gradient on each rank. A hook on the parameter sums them before they are accumulated. If the
engine accumulates whole gradients over the micro-batches of a step, they are summed once a step, in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.parallel.collectives import all_reduce_in_place
from harness.parallel.comm import sum_over_group
from harness.parallel.tensor.shard import Shard, shard_of


@dataclass
class GradientSum:
    """How the gradient of a parameter is summed over a group.

    Attributes:
        shard: this rank's shard of the parameter, if several ranks hold copies of a shard. Shards are then put into a
            whole gradient that is summed over the whole group, so that those ranks need no group of their own.
        once_a_step: whether `sum_once` sums it, instead of a hook.
    """

    group: dist.ProcessGroup | None
    shard: Shard | None = None
    once_a_step: bool = False

    def widen(self, grad: Tensor) -> Tensor:
        """Return the tensor to sum: the gradient, padded with zeros to `shard.full_shape` for a shard."""
        if self.shard is None:
            return grad
        full = grad.new_zeros(self.shard.full_shape)
        self.shard.put(grad, full)
        return full

    def narrow(self, total: Tensor) -> Tensor:
        """Extract this rank's gradient, of its parameter's shape, from the sum."""
        return total if self.shard is None else self.shard.take(total)

    def of_hook(self, grad: Tensor | None) -> Tensor | None:
        """Sum a gradient as a parameter's hook; return None if it is deferred (`weight_gradients.py`)."""
        if grad is None or self.once_a_step:
            return grad
        return self.narrow(sum_over_group(self.widen(grad), self.group))


def sum_gradients(module: nn.Module, names: list[str], of: GradientSum) -> None:
    """Sum the gradients of `module`'s own parameters `names` from now on."""

    def before_forward(owner: nn.Module, _args: object) -> None:
        # Looked up at each forward, because materialising replaces parameters on the meta device.
        for name, param in owner.named_parameters(recurse=False):
            if name in names and param.requires_grad and not sums_gradient(param):
                sum_gradient(param, of)

    module.register_forward_pre_hook(before_forward)


def sum_gradient(param: nn.Parameter, of: GradientSum) -> None:
    own = replace(of, once_a_step=getattr(param, "summed_once_a_step", False))
    param.register_hook(own.of_hook)
    # With its id, because a copy of the parameter may take over the attribute, but never the hook.
    param.gradient_sum = (id(param), own)  # type: ignore[attr-defined]  # a parameter takes any attribute


def sums_gradient(param: nn.Parameter) -> bool:
    """Return whether `sum_gradient` was called for this very object, whose attributes may be copies."""
    return bool(getattr(param, "gradient_sum", (None, None))[0] == id(param))


def sum_gradients_of_copies(module: nn.Module, names: list[str], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of `module`'s own parameters `names` over the ranks that hold the same shards."""
    for name in names:
        shard = shard_of(param) if (param := getattr(module, name)) is not None else None
        if shard is not None:
            sum_gradients(module, [name], GradientSum(group, shard))


def defer_sums(parameters: Iterable[nn.Parameter]) -> None:
    """Leave summing these parameters' gradients to `sum_once`; must be called before their first forward."""
    for param in parameters:
        param.summed_once_a_step = True  # type: ignore[attr-defined]  # a parameter takes any attribute


def sum_once(parameters: Iterable[nn.Parameter], gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
    """All-reduce the deferred gradients in place, one all-reduce for each dtype."""
    partial: list[tuple[Tensor, GradientSum]] = []
    for param in parameters:
        if sums_gradient(param) and (grad := gradient_of(param)) is not None:
            partial.append((grad, param.gradient_sum[1]))  # type: ignore[attr-defined]  # `sum_gradient` set it
    # `groupby` needs equal dtypes side by side. The sort is stable, so gradients of one dtype keep the order of
    # `parameters` on every rank, and the concatenated tensors match.
    partial.sort(key=lambda pair: str(pair[0].dtype))
    with torch.no_grad():
        for _, same in groupby(partial, key=lambda pair: pair[0].dtype):
            pairs = list(same)
            # Shards become whole gradients first: ranks hold different shards, but an all-reduce adds equal shapes.
            wide = [of.widen(grad) for grad, of in pairs]
            total = torch.cat([grad.reshape(-1) for grad in wide])
            if (group := pairs[0][1].group) is not None:
                all_reduce_in_place(total, group)
            parts = total.split([grad.numel() for grad in wide])
            for (grad, of), part, like in zip(pairs, parts, wide, strict=True):
                grad.copy_(of.narrow(part.view_as(like)))
