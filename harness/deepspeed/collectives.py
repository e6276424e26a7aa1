"""Replace the collectives that DeepSpeed's ZeRO uses to reduce gradients and gather parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.runtime.zero import stage3
from torch import Tensor
from torch.distributed import ProcessGroup

InPlace = Callable[[Tensor, ProcessGroup | None], bool]
"""Takes a tensor and its group; returns False to leave the collective to torch.distributed."""
Into = Callable[[Tensor, Tensor, ProcessGroup | None], bool]
"""Takes output tensor, input tensor and group; returns False to leave the collective to torch.distributed."""
Means = Callable[[Sequence[Tensor], ProcessGroup | None], list[Tensor] | None]
"""Takes tensors and their group; returns this rank's flat shard of each mean, or None to leave it to DeepSpeed."""

_MEANS_OF_DEEPSPEED = stage3.reduce_scatter_coalesced
_SUMS = (comm.ReduceOp.SUM, dist.ReduceOp.SUM)


class Done:
    """The handle of an asynchronous collective that has already completed."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ScatteredSum:
    """A reduce-scatter in flight: an all-to-all followed by a local sum.

    gloo has no reduce-scatter of its own: it all-reduces the whole tensor and drops the rest. This sends half as much.
    """

    def __init__(self, shard: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
        # Keep the sent tensor until `wait`: gloo reads its memory in the background.
        self._shard = shard
        self._sent = x.contiguous()
        self._parts = torch.empty_like(self._sent)
        self._work: dist.Work | None = dist.all_to_all_single(self._parts, self._sent, group=group, async_op=True)

    def wait(self) -> bool:
        """Wait until `shard` [n / ranks, ...] holds this rank's part of the sum over the group."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            with torch.no_grad():
                torch.sum(self._parts.view(-1, *self._shard.shape), 0, out=self._shard)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` has been called; before that, the shard has its old values."""
        return self._work is None


def _is_gloo(x: Tensor, group: ProcessGroup | None) -> bool:
    return x.device.type == "cpu" and dist.get_backend(group) == "gloo"


def carry_collectives(sums: InPlace, gathers: Into, scatters: Into, means: Means) -> None:
    """Make DeepSpeed in this process use these collectives, or torch.distributed if one returns False or None.

    A collective must be complete when it returns. All ranks of the group must accept or refuse alike, or some would
    wait in torch.distributed for the others. DeepSpeed calls its collectives in the same order on each rank.

    Args:
        sums: all-reduce, in place.
        gathers: all-gather into one tensor.
        scatters: reduce-scatter of one tensor.
        means: reduce-scatter of ZeRO-3's gradients, averaged.
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
        if op in _SUMS and _is_gloo(input_tensor, group):
            under_way = ScatteredSum(output_tensor, input_tensor, group)
            return under_way if async_op else under_way.wait()
        return of_torch.reduce_scatter_tensor(backend, output_tensor, input_tensor, op, group, async_op)

    # On the object, not its class, so that a second backend in the process keeps torch's collectives.
    backend.all_reduce = all_reduce
    backend.all_gather_into_tensor = all_gather_into_tensor
    backend.reduce_scatter_tensor = reduce_scatter_tensor

    def reduce_scatter_coalesced(tensors: list[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
        found = means(tensors, group)
        return _MEANS_OF_DEEPSPEED(tensors, group) if found is None else found

    stage3.reduce_scatter_coalesced = reduce_scatter_coalesced  # stage3 has imported the function by name
