"""Gradients that are a part on each tensor-parallel rank, and are summed over the group.

A parameter that ranks hold alike but use on their own heads or tokens, or of which neighbours hold copies, gets a part
of its gradient on each of them. A hook on the parameter takes the sum before anything is accumulated; where an engine
accumulates whole gradients over the micro-batches of a step, they are summed once a step, all in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.parallel.collectives.of_group import sum_in_place
from harness.parallel.comm import sum_over_group
from harness.parallel.tensor.shard import Shard, shard_of


@dataclass
class GradientSum:
    """The sum of a gradient over a group.

    Attributes:
        shard: where ranks hold copies of a part of the parameter: the part of this rank. The whole gradient is then
            summed over the whole group: no group of its own has to be made for it.
        once_a_step: whether `sum_once` takes it.
    """

    group: dist.ProcessGroup | None
    shard: Shard | None = None
    once_a_step: bool = False

    def widen(self, grad: Tensor) -> Tensor:
        """Return what ranks add up."""
        if self.shard is None:
            return grad
        full = grad.new_zeros(self.shard.full_shape)
        self.shard.put(grad, full)
        return full

    def narrow(self, total: Tensor) -> Tensor:
        """Return this rank's gradient from what was added up."""
        return total if self.shard is None else self.shard.take(total)

    def of_hook(self, grad: Tensor | None) -> Tensor | None:
        """Return what a parameter's hook returns; without a gradient where it is put off: `weight_gradients.py`."""
        if grad is None or self.once_a_step:
            return grad
        return self.narrow(sum_over_group(self.widen(grad), self.group))


def sum_gradients(module: nn.Module, names: list[str], of: GradientSum) -> None:
    """Sum the gradients of `module`'s own parameters `names`.

    The parameters are looked up at each forward, so that those which take the place of meta tensors are served too.
    """

    def before_forward(owner: nn.Module, _args: object) -> None:
        for name, param in owner.named_parameters(recurse=False):
            if name in names and param.requires_grad and not sums_gradient(param):
                sum_gradient(param, of)

    module.register_forward_pre_hook(before_forward)


def sum_gradient(param: nn.Parameter, of: GradientSum) -> None:
    """Sum the gradient of `param`."""
    own = replace(of, once_a_step=getattr(param, "summed_once_a_step", False))
    param.register_hook(own.of_hook)
    param.gradient_sum = (id(param), own)  # type: ignore[attr-defined]  # an attribute may be copied, a hook is not


def sums_gradient(param: nn.Parameter) -> bool:
    """Whether `param` is served by `sum_gradient`: this very object, not one whose attributes it was given."""
    return bool(getattr(param, "gradient_sum", (None, None))[0] == id(param))


def sum_gradients_of_copies(module: nn.Module, names: list[str], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of `module`'s own parameters `names` over the ranks that hold the same shards of them."""
    for name in names:
        shard = shard_of(param) if (param := getattr(module, name)) is not None else None
        if shard is not None:
            sum_gradients(module, [name], GradientSum(group, shard))


def put_off_sums(parameters: Iterable[nn.Parameter]) -> None:
    """Leave the sums of these parameters' gradients to `sum_once`; call it before their first forward."""
    for param in parameters:
        param.summed_once_a_step = True  # type: ignore[attr-defined]  # a parameter takes any attribute


def sum_once(parameters: Iterable[nn.Parameter], gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
    """Sum the gradients that were put off, in place; those of one dtype in one all-reduce."""
    partial: list[tuple[Tensor, GradientSum]] = []
    for param in parameters:
        if sums_gradient(param) and (grad := gradient_of(param)) is not None:
            partial.append((grad, param.gradient_sum[1]))  # type: ignore[attr-defined]  # `sum_gradient` set it
    partial.sort(key=lambda pair: str(pair[0].dtype))
    with torch.no_grad():
        for _, same in groupby(partial, key=lambda pair: pair[0].dtype):
            pairs = list(same)
            wide = [of.widen(grad) for grad, of in pairs]
            total = torch.cat([grad.reshape(-1) for grad in wide])
            if (group := pairs[0][1].group) is not None:
                sum_in_place(total, group)
            parts = total.split([grad.numel() for grad in wide])
            for (grad, of), part, like in zip(pairs, parts, wide, strict=True):
                grad.copy_(of.narrow(part.view_as(like)))
