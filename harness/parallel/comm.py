"""The communication of tensor parallelism, as differentiable functions of a tensor and a process group.

Each has a forward and a backward (f and g in Shoeybi et al. 2019, arXiv 1909.08053, figure 3). A tensor is *whole* if
every rank of the group holds the same values, *split* if each rank holds a shard of the last dimension in rank order,
and *partial* if the ranks' tensors still have to be summed. Nothing is changed in place. Shards need not be equal:
`widths` holds their sizes in rank order. Without a group, or in a group of one rank, every function returns its input:
no copy, no graph node. All ranks of the group must call the functions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from harness.parallel.collectives import all_gather, all_reduce, all_reduce_max, start_reduce_scatter
from harness.parallel.compiling import Eager

Context: TypeAlias = Any
"""The context that torch passes from forward to backward: an object that takes any attribute."""

# Names of the autograd nodes at which a walk from the output to the inputs enters and leaves split values. torch makes
# them from the names of the autograd functions below.
INTO_SPLIT = frozenset({"_ReduceFromGroupBackward", "GatherFromGroupBackward", "_ScatterSequenceBackward"})
OUT_OF_SPLIT = frozenset(
    {"_CopyToGroupBackward", "_CopyOnceBackward", "_CopyTailToGroupBackward", "SplitToGroupBackward"}
)
# The same for values of all tokens and of a shard of the sequence: see `harness.parallel.tensor.sequence`.
GATHERS_SHARES = "_GatherSequenceBackward"
SPLITS_SEQUENCE = "_SplitSequenceBackward"


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """One rank's place in its tensor-parallel group.

    `group` may be None for modules that are only built on the meta device, for their sizes and shards. Such modules
    must not run if `size` is above 1, because they cannot communicate.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> TensorParallel:
        """Return the calling rank's place in `group`; None is a group of one rank."""
        return cls(group=group, rank=group_rank(group), size=group_size(group))


ALONE = TensorParallel()
"""The only rank of a group."""


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in `group`; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return the calling rank's index in `group`; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


# The function behind the class method, because a subclass of Function is its first argument here.
apply: Eager[..., Tensor] = Eager(vars(torch.autograd.Function)["apply"].__func__)
"""Call an autograd function: `apply(function, *inputs)` returns its output and is never compiled.

torch's own `apply`, with the types that torch lacks.
"""


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the whole `x` [...]. Backward: all-reduce the partial gradient (f)."""
    return x if group_size(group) == 1 else apply(_CopyToGroup, x, group)


def copy_tail_to_group(x: Tensor, tail: int, group: dist.ProcessGroup | None) -> Tensor:
    """Act as `copy_to_group` on the last `tail` entries of `x` [..., n], and as the identity on the others."""
    return x if group_size(group) == 1 else apply(_CopyTailToGroup, x, tail, group)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce the partial `x` [...]. Backward: the identity (g)."""
    return x if group_size(group) == 1 else apply(_ReduceFromGroup, x, group)


def gather_from_group(x: Tensor, group: dist.ProcessGroup | None, widths: Sequence[int] = ()) -> Tensor:
    """All-gather the shards `x` [..., n] into [..., sum of n]; without `widths` all n are equal.

    Backward: keep this rank's shard of the gradient, which must be whole, as every rank computes the same from there.
    """
    if group_size(group) == 1:
        return x
    return apply(GatherFromGroup, x, group, tuple(widths) or (x.shape[-1],) * group_size(group), -1)


def split_to_group(x: Tensor, group: dist.ProcessGroup | None, widths: Sequence[int] = ()) -> Tensor:
    """Keep this rank's shard of the whole `x` [..., n], n / size without `widths`.

    Backward: all-gather the gradient. Raises ValueError if the widths do not add up to n.
    """
    size = group_size(group)
    if size == 1:
        return x
    widths = tuple(widths) or (x.shape[-1] // size,) * size
    if sum(widths) != x.shape[-1]:
        raise ValueError(f"a last dimension of {x.shape[-1]} cannot be split over {size} ranks as {widths}")
    return apply(SplitToGroup, x, group, widths, -1)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `x` [...] into a new tensor without a graph, for gradients."""
    if group is None or group_size(group) == 1:
        return x
    return all_reduce(x, group)


def max_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `x` [...] by the elementwise maximum into a new tensor without a graph."""
    if group is None or group_size(group) == 1:
        return x
    return all_reduce_max(x, group)


def join_shards(shard: Tensor, group: dist.ProcessGroup, widths: Sequence[int], dim: int = 1) -> Tensor:
    """All-gather shards that have `widths` entries along `dim`, without an autograd graph."""
    parts = all_gather(_padded(shard, max(widths), dim).contiguous(), group)
    return torch.cat([part.narrow(dim, 0, width) for part, width in zip(parts, widths, strict=True)], dim=dim)


def own_shard(whole: Tensor, group: dist.ProcessGroup, widths: Sequence[int], dim: int = 1) -> Tensor:
    """Return a copy of this rank's entries along `dim`."""
    rank = group_rank(group)
    return whole.narrow(dim, sum(widths[:rank]), widths[rank]).contiguous()


def start_sum_of_shard(
    partial: Tensor, group: dist.ProcessGroup, widths: Sequence[int], dim: int = 1
) -> Callable[[], Tensor]:
    """Begin a reduce-scatter of `partial` along `dim`; return a function that waits for this rank's shard."""
    # The collective scatters along the first dimension, so the ranks' parts are concatenated there.
    parts = torch.cat([_padded(part, max(widths), dim) for part in partial.split(list(widths), dim)])
    scattered = start_reduce_scatter(parts, group)

    def shard() -> Tensor:
        total = scattered()
        own = widths[group_rank(group)]
        return total if own == total.shape[dim] else total.narrow(dim, 0, own).contiguous()

    return shard


def sum_of_shard(partial: Tensor, group: dist.ProcessGroup, widths: Sequence[int], dim: int = 1) -> Tensor:
    """Reduce-scatter `partial` along `dim` to this rank's shard."""
    return start_sum_of_shard(partial, group, widths, dim)()


def _padded(shard: Tensor, width: int, dim: int) -> Tensor:
    """Pad a shard to `width` entries along `dim`, because collectives need the same size on all ranks."""
    missing = width - shard.shape[dim]
    # `pad` takes the dimensions from the last to the first.
    behind = (0, 0) * (shard.dim() - 1 - dim % shard.dim())
    return pad(shard, (*behind, 0, missing)) if missing else shard


class MoveShards(torch.autograd.Function):
    """Moves shards between the ranks of a group, and their gradients back.

    A subclass is a pair of functions of (tensor, group, widths, dim), each the other's transpose. The walk over the
    graph in `tensor/gradient_analysis.py` knows a node by the name of its subclass.
    """

    forth: ClassVar[Callable[..., Tensor]]
    back: ClassVar[Callable[..., Tensor]]

    # Class methods, unlike torch's static ones, so that a subclass only names its two functions.
    @classmethod
    def forward(cls, ctx: Context, x: Tensor, *how: object) -> Tensor:
        ctx.how = how
        return cls.forth(x, *how)

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return cls.back(grad, *ctx.how), None, None, None


class GatherFromGroup(MoveShards):
    forth, back = staticmethod(join_shards), staticmethod(own_shard)


class SplitToGroup(MoveShards):
    forth, back = staticmethod(own_shard), staticmethod(join_shards)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # A tensor of its own in the graph, in the memory of x.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_group(grad, ctx.group), None


class _CopyTailToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, tail: int, group: dist.ProcessGroup) -> Tensor:
        ctx.tail = tail
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        head, tail = grad.split([grad.shape[-1] - ctx.tail, ctx.tail], dim=-1)
        return torch.cat([head, sum_over_group(tail, ctx.group)], dim=-1), None, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_group(x, group)

    @staticmethod
    def backward(_ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
