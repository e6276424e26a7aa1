"""Share one gradient all-reduce among column-parallel layers with the same input, such as query, key and value.

By itself, each layer would all-reduce its partial gradient of the input. Here the layers take the same copy of the
input, so that autograd adds up their partial gradients on each rank, and the sum is all-reduced once. A Llama layer
then has two all-reduces in a forward and two in a backward, as in Megatron-LM, which fuses these layers into one. The
layers' weight gradients, which do not need the sum, are computed meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from harness.parallel.collectives import start_all_reduce
from harness.parallel.comm import Context, apply, copy_to_group, group_size
from harness.parallel.compiling import Eager
from harness.parallel.weight_gradients import Product, accumulate


@dataclass
class SharedInput:
    """A common input of column-parallel layers.

    Attributes:
        tensors: the input, and the layers' copy of it. They are cleared when the gradient of the copy arrives.
        products: operands of the layers' weight gradients, which are computed while that gradient is summed.
    """

    tensors: list[Tensor] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)


@dataclass
class _Latest(threading.local):
    """The latest input of this thread's column-parallel layers."""

    key: tuple[object, ...] = ()
    shared: SharedInput = field(default_factory=SharedInput)


_LATEST = _Latest()


def attach(ctx: Context, shared: SharedInput) -> None:
    # A weak reference: a recomputed copy may never get a gradient, and would form a reference cycle with its node.
    ctx.shared = weakref.ref(shared)
    ctx.products = shared.products


def forget(ctx: Context) -> None:
    # The tensors of the copy whose gradient has arrived, and of the latest recomputed one: kept, they would make the
    # graph outlive the step.
    for shared in (ctx.shared(), _LATEST.shared):
        if shared is not None:
            shared.tensors.clear()


@Eager
def copy_once(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, list[Product] | None]:
    """Return `copy_to_group(x)` for `x` [..., in], and a list for operands of weight gradients (None without a group).

    Consecutive calls with the same input return the same copy.
    """
    if group_size(group) == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return copy_to_group(x, group), None
    # The version too: after a change in place, a copy of `x` from before belongs to another graph node.
    key = (id(x), x._version, group)  # noqa: SLF001  # no public name
    if _LATEST.key != key or not _LATEST.shared.tensors:
        shared = SharedInput()
        # The input too, to keep it alive: a new tensor could otherwise get its id, and with it the wrong copy.
        shared.tensors += [x, apply(_CopyOnce, x, group, shared)]
        _LATEST.key = key
        _LATEST.shared = shared
    return _LATEST.shared.tensors[1], _LATEST.shared.products


def keep_copy(shared: SharedInput, group: dist.ProcessGroup) -> None:
    """Make the next `copy_once` of an input return the copy in `shared`, whose gradient another function sums."""
    x = shared.tensors[0]
    _LATEST.key = (id(x), x._version, group)  # noqa: SLF001  # no public name
    _LATEST.shared = shared


class _CopyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: dist.ProcessGroup, shared: SharedInput) -> Tensor:
        ctx.group = group
        attach(ctx, shared)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        forget(ctx)
        total = start_all_reduce(grad, ctx.group)
        accumulate(ctx.products)
        return total(), None, None
