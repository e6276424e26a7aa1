"""One gradient all-reduce for an input that several column-parallel layers take, as query, key and value do.

Each layer alone sums its part of the input's gradient over the group. Here the layers take the same copy of the input,
so that autograd adds their parts up on each rank, and they are summed over the group once: a Llama layer has two
all-reduces in a forward and two in a backward, as in Megatron-LM, which fuses these layers into one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from harness.parallel.comm import Context, apply, copy_to_group, group_size, sum_over_group
from harness.parallel.compiling import eager


@dataclass
class _Latest(threading.local):
    """The latest input of this thread's column-parallel layers, and its copy; given up when a gradient arrives."""

    key: tuple[object, ...] = ()
    kept: list[Tensor] = field(default_factory=list)


_LATEST = _Latest()


@eager
def copy_once(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`copy_to_group`, which returns the same copy again where it is called for the same input in a row."""
    if group_size(group) == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return copy_to_group(x, group)
    key = (id(x), x._version, group)  # noqa: SLF001  # no public name
    if _LATEST.key != key or not _LATEST.kept:
        kept: list[Tensor] = []
        kept += [x, apply(_CopyOnce, x, group, kept)]  # with the input, as another may get its id
        _LATEST.key, _LATEST.kept = key, kept
    return _LATEST.kept[1]


def keep_copy(kept: list[Tensor], group: dist.ProcessGroup) -> None:
    """Let the next `copy_once` of the first tensor in `kept` return the second, of which another function sums the
    gradients; that function clears the list."""
    _LATEST.key, _LATEST.kept = (id(kept[0]), kept[0]._version, group), kept  # noqa: SLF001  # no public name


class _CopyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: dist.ProcessGroup, kept: list[Tensor]) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.kept.clear()  # else the graph of the step would outlive it
        return sum_over_group(grad, ctx.group), None, None
