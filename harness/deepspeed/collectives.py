"""Replace the collectives by which DeepSpeed's ZeRO sums gradients and gathers parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.runtime.zero import stage3
from torch import Tensor
from torch.distributed import ProcessGroup

InPlace = Callable[[Tensor, ProcessGroup | None], bool]
"""A tensor and its group; false where it is for torch.distributed."""
Into = Callable[[Tensor, Tensor, ProcessGroup | None], bool]
"""What to fill, a tensor and its group; likewise."""
Means = Callable[[Sequence[Tensor], ProcessGroup | None], list[Tensor] | None]
"""Tensors and their group; this rank's part of the mean of each, or None."""

_MEANS_OF_DEEPSPEED = stage3.reduce_scatter_coalesced
_SUMS = (comm.ReduceOp.SUM, dist.ReduceOp.SUM)


class Done:
    """The handle of an asynchronous collective that is already done."""

    def wait(self) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


def carry_collectives(sums: InPlace, gathers: Into, scatters: Into, means: Means) -> None:
    """Offer the collectives of this process's DeepSpeed to these functions first, then to torch.distributed.

    Args:
        sums: all-reduce, in place.
        gathers: all-gather into one tensor.
        scatters: reduce-scatter of one tensor.
        means: reduce-scatter of ZeRO-3's gradients, averaged.

    They must be done when they return, and must decide alike on all ranks: they are asked in one order.
    """
    backend = comm.cdb
    of_torch = type(backend)

    def all_reduce(
        tensor: Tensor, op: object = comm.ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
    ) -> object:
        if op in _SUMS and sums(tensor, group):
            return Done() if async_op else None
        return of_torch.all_reduce(backend, tensor, op, group, async_op)

    def all_gather_into_tensor(
        output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
    ) -> object:
        if gathers(output_tensor, input_tensor, group):
            return Done() if async_op else None
        return of_torch.all_gather_into_tensor(backend, output_tensor, input_tensor, group, async_op)

    def reduce_scatter_tensor(
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: object = comm.ReduceOp.SUM,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> object:
        if op in _SUMS and scatters(output_tensor, input_tensor, group):
            return Done() if async_op else None
        return of_torch.reduce_scatter_tensor(backend, output_tensor, input_tensor, op, group, async_op)

    backend.all_reduce = all_reduce
    backend.all_gather_into_tensor = all_gather_into_tensor
    backend.reduce_scatter_tensor = reduce_scatter_tensor

    def reduce_scatter_coalesced(tensors: list[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
        found = means(tensors, group)
        return _MEANS_OF_DEEPSPEED(tensors, group) if found is None else found

    stage3.reduce_scatter_coalesced = reduce_scatter_coalesced
