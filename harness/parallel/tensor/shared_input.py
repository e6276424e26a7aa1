"""One gradient all-reduce for an input that several column-parallel layers take, as query, key and value do.

Each layer alone sums its part of the input's gradient over the group. Here the layers take the same copy of the input,
so that autograd adds their parts up on each rank, and they are summed over the group once: a Llama layer has two
all-reduces in a forward and two in a backward, as in Megatron-LM, which fuses these layers into one. While that sum is
under way, the layers' weight gradients are computed, which do not need it.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from harness.parallel.collectives.of_group import start_sum
from harness.parallel.comm import Context, apply, copy_to_group, group_size
from harness.parallel.compiling import eager
from harness.parallel.weight_gradients import Product, accumulate


@dataclass
class SharedInput:
    """An input that column-parallel layers take.

    Attributes:
        tensors: the input, and the copy of it that they take; cleared when the gradient of the copy arrives, else the
            graph of the step would outlive it. The copy's node in the graph does not keep them: one that is computed
            again for its values alone gets no gradient, and would be left to Python's collector.
        products: what the layers' weight gradients are computed from, while that gradient is summed.
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
    """Let the node of a copy find what is shared."""
    ctx.shared, ctx.products = weakref.ref(shared), shared.products


def forget(ctx: Context) -> None:
    """Give up the tensors of a copy whose gradient has arrived, and those of what was computed again before that."""
    for shared in (ctx.shared(), _LATEST.shared):
        if shared is not None:
            shared.tensors.clear()


@eager
def copy_once(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, list[Product] | None]:
    """Return what `copy_to_group` does, the same copy again where this is called for the same input in a row; and where
    to leave what weight gradients are computed from."""
    if group_size(group) == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return copy_to_group(x, group), None
    key = (id(x), x._version, group)  # noqa: SLF001  # no public name
    if _LATEST.key != key or not _LATEST.shared.tensors:
        shared = SharedInput()
        shared.tensors += [x, apply(_CopyOnce, x, group, shared)]  # with the input, as another may get its id
        _LATEST.key, _LATEST.shared = key, shared
    return _LATEST.shared.tensors[1], _LATEST.shared.products


def keep_copy(shared: SharedInput, group: dist.ProcessGroup) -> None:
    """Let the next `copy_once` of an input return its copy, of which another function sums the gradients."""
    x = shared.tensors[0]
    _LATEST.key, _LATEST.shared = (id(x), x._version, group), shared  # noqa: SLF001  # no public name


class _CopyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: dist.ProcessGroup, shared: SharedInput) -> Tensor:
        ctx.group = group
        attach(ctx, shared)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        forget(ctx)
        total = start_sum(grad, ctx.group)
        accumulate(ctx.products)
        return total(), None, None
