"""The whole model's gradient norm, in which each parameter counts once in every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from harness.topology.groups import Groups

BLOCK = 2**20
"""Elements converted to float64 at a time on a CPU, where torch cannot read float32 and add in float64."""


def global_norm(
    dense: Iterable[Tensor], experts: Iterable[Tensor], groups: Groups, device: torch.device, *, divided: bool = False
) -> Tensor:
    """Return the L2 norm of the whole model's gradient, a float64 scalar on `device`; all ranks call it.

    Args:
        dense: gradients of the parameters that are replicated over data-parallel ranks.
        experts: gradients of this rank's experts; other ranks of `ep_group` have other experts.
        divided: whether each data-parallel rank passes its slices of the gradients instead of whole ones.
    """
    total = square_sum(experts, device)
    over = groups.dp_group if divided else groups.ep_group
    if divided:
        total += square_sum(dense, device)
    if over is not None:
        dist.all_reduce(total, group=over)
    if not divided:
        # Only after the sum over data-parallel ranks, which would count replicated gradients several times.
        total = total + square_sum(dense, device)
    # Within each stage first, so that its tensor-parallel ranks contribute the same value to the sum over stages.
    for group in (groups.tp_group, groups.pp_group):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def square_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements, a float64 scalar on `device`; 0 without tensors."""
    size = BLOCK if device.type == "cpu" else None
    parts = [part for tensor in tensors for part in tensor.detach().reshape(-1).split(size or max(1, tensor.numel()))]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    # In float64 the grouping of terms, which depends on the layout, changes the result by far less than float32's
    # precision. One call for all tensors: on a GPU it is one kernel for hundreds of them, and reads their own dtype.
    # torch has no sum of squares over a list. Root and square in float64 lose nothing that float32 could hold.
    return torch.stack(torch._foreach_norm(parts, 2.0, dtype=torch.float64)).square().sum()


def counts(parameter: Tensor, tp_rank: int) -> bool:
    """Return whether this rank counts a parameter in the norm."""
    # A tied parameter is counted by the first stage that holds it. DeepSpeed marks the other copies.
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    # Each tensor-parallel rank counts its own shards; of replicated parameters, rank 0's copy counts.
    return tp_rank == 0 or bool(getattr(parameter, "tensor_model_parallel", False))
