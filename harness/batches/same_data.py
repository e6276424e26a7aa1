"""Compare the data of ranks that must read the same: first and last stage, tensor-parallel and context ranks.

Data sets and collators may draw random numbers, so the global generators are seeded before each call (`stream.py`). But
a data set may have its own generator, or depend on the rank. The inputs on the first stage and the labels on the last
would then belong to different samples. The loss would not show it, so the first micro-batches are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.errors import UserError
from harness.topology.agreement import all_gather_object, spell_ranks
from harness.topology.groups import Groups


def require_same_data(micro_batches: Sequence[object], groups: Groups) -> None:
    """Raise UserError, on all ranks, unless all ranks of a data-parallel coordinate hold the same micro-batches.

    All ranks call it; `micro_batches` is empty where no data is read.
    """
    if dist.get_world_size() == 1:
        return
    own = groups.coordinate.batch_rank, tensor_digest(micro_batches) if micro_batches else None
    # Over all ranks, not a group: a difference anywhere must end every rank, or the others wait for it in the step.
    found = all_gather_object(own)
    for batch_rank in range(groups.layout.batch_ranks):
        ranks = {rank: read for rank, (place, read) in enumerate(found) if place == batch_rank and read is not None}
        first = min(ranks)
        others = [rank for rank, read in ranks.items() if read != ranks[first]]
        if others:
            raise UserError(
                f"{spell_ranks(others)} got different samples than rank {first} for the same micro-batch: the data set "
                "or data_collator depends on the rank, or draws from a random generator of its own: make its output "
                "a function of the samples, or draw from the global generators of torch, numpy or Python, whose seeds "
                "are set before each micro-batch"
            )


def tensor_digest(value: object) -> str:
    """Return a hash of all tensors in nested values: shapes, dtypes and entries."""
    total = hashlib.sha256()
    for leaf in tree_leaves(value):
        tensor = torch.as_tensor(leaf) if isinstance(leaf, (Tensor, int, float)) else None
        if tensor is None:
            total.update(repr(leaf).encode())
            continue
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        # As bytes, because numpy has no bfloat16.
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
