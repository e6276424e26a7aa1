"""Would a checkpoint hold each value once? The ranks count what they are about to write.

A rank that takes its values for fewer than they are, or for those of another tensor, would leave a file of the right
size with wrong values in it, which nothing finds before a run has gone on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from harness.checkpoint.tensors.local_shard import LocalShard
from harness.errors import UserError
from harness.topology.agreement import values_of_all
from harness.topology.groups import Groups


def require_each_value_once(tensors: Sequence[LocalShard], groups: Groups) -> None:
    """Raise UserError, on all ranks alike, unless the ranks of each stage hold each value of its tensors once.

    All ranks call it. `tensors` have the same names, in the same order, on all ranks of a stage.
    """
    counts = torch.tensor([_written(held) for held in tensors], dtype=torch.int64)
    counts = counts.to(get_accelerator().current_device_name())
    for group in (groups.tp_group, groups.dp_group):
        if group is not None and tensors:
            dist.all_reduce(counts, group=group)
    pairs = zip(tensors, counts.tolist(), strict=True)
    wrong = next((pair for pair in pairs if pair[1] != prod(pair[0].full_shape)), None)
    own = wrong and f"{wrong[0].name}: the ranks would save {wrong[1]:,} of its {prod(wrong[0].full_shape):,} values"
    if found := next(filter(None, values_of_all(own)), None):
        raise UserError(f"no checkpoint can be saved in this layout: {found}; please report it")


def _written(held: LocalShard) -> int:
    return sum(values.numel() for _, values in held.pieces()) if held.owned else 0
