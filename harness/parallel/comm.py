"""The communication of tensor parallelism, as differentiable functions of a tensor and a process group.

Each comes as a pair of a forward and a backward (f and g in Shoeybi et al. 2019, arXiv 1909.08053, figure 3).
A tensor is *whole* where every rank of the group holds the same values, *split* where each holds its share of
the last dimension in rank order, *partial* where the ranks' tensors still have to be summed. Nothing is
changed in place. Without a group, or with a group of one rank, every function returns its very input: no
copy, no node in the graph. All ranks of the group must call in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Names of the nodes at which a walk from the output to the inputs enters a stretch of split values, and leaves it.
INTO_SPLIT = frozenset({"_ReduceFromGroupBackward", "_GatherFromGroupBackward"})
OUT_OF_SPLIT = frozenset({"_CopyToGroupBackward", "_CopyTailToGroupBackward", "_SplitToGroupBackward"})


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """One rank's place in its tensor-parallel group.

    `group` may be absent where modules are only laid out on the meta device, for sizes and shards: nothing
    then communicates, so such modules must not be run when `size` is above 1.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> TensorParallel:
        """The calling rank's place in `group`; no group is a group of one."""
        return cls(group=group, rank=group_rank(group), size=group_size(group))


def group_size(group: dist.ProcessGroup | None) -> int:
    """The number of ranks in `group`; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """The calling rank's index in `group`; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: `x` itself, whole. Backward: the gradients, partial, are summed over the group (f)."""
    return x if group_size(group) == 1 else _CopyToGroup.apply(x, group)


def copy_tail_to_group(x: Tensor, tail: int, group: dist.ProcessGroup | None) -> Tensor:
    """`copy_to_group` for the last `tail` entries of `x`'s last dimension; the gradients of the others are whole."""
    return x if group_size(group) == 1 else _CopyTailToGroup.apply(x, tail, group)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: `x`, partial, is summed over the group. Backward: the gradient itself, whole (g)."""
    return x if group_size(group) == 1 else _ReduceFromGroup.apply(x, group)


def gather_from_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: the group's shares `x` (..., n) are joined into the whole (..., n * size).

    Backward: each rank keeps its share of the gradient, which must be whole: what follows is computed alike
    on every rank.
    """
    return x if group_size(group) == 1 else _GatherFromGroup.apply(x, group)


def split_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Forward: each rank keeps its share (..., n / size) of the whole `x` (..., n). Backward: the gradients
    of the shares are joined into the whole. Raises ValueError where the size does not divide n."""
    return x if group_size(group) == 1 else _SplitToGroup.apply(x, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of `x` over the group, in a new tensor, outside of the graph: for gradients."""
    if group_size(group) == 1:
        return x
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def max_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The elementwise maximum of `x` over the group, in a new tensor, outside of the graph."""
    if group_size(group) == 1:
        return x
    largest = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def _join(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    shares = [torch.empty_like(x) for _ in range(group_size(group))]
    dist.all_gather(shares, x, group=group)
    return torch.cat(shares, dim=-1)


def _own_share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group_size(group)
    if x.shape[-1] % size:
        raise ValueError(f"a last dimension of {x.shape[-1]} cannot be split over {size} ranks")
    share = x.shape[-1] // size
    return x.narrow(-1, group_rank(group) * share, share).contiguous()


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_group(grad, ctx.group), None


class _CopyTailToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tail: int, group: dist.ProcessGroup) -> Tensor:
        ctx.tail, ctx.group = tail, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        head, tail = grad.split([grad.shape[-1] - ctx.tail, ctx.tail], dim=-1)
        return torch.cat([head, sum_over_group(tail, ctx.group)], dim=-1), None, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_group(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _join(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_share(grad, ctx.group), None


class _SplitToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_share(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _join(grad, ctx.group), None
