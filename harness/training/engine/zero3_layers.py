"""ZeRO-3's parameters, spread over the data-parallel ranks layer by layer as soon as a layer has its weights.

With `zero_hpz_partition_size` (ZeRO++'s hpZ) each group of that many neighbours keeps a second copy of the parameters,
made in the forward, from which the backward gathers them: then only the forward gathers between hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch.distributed as dist
from torch import nn

from harness.deepspeed.process_groups import set_secondary_group
from harness.deepspeed.zero3_parameters import PartitionInPlace
from harness.parallel.memory import malloc_trim
from harness.parallel.zero.zero3_partition import Zero3Partition
from harness.topology.env import run_timeout
from harness.training.engine.build import deepspeed_config, mark_leaves
from harness.training.engine.context import EngineContext


def zero3_partition(context: EngineContext) -> Zero3Partition | None:
    """Return what this rank keeps of every parameter under ZeRO-3; None otherwise, or where it keeps more (hpZ)."""
    if context.resolved.zero_stage < 3 or secondary_size(context) > 1:
        return None
    return Zero3Partition(index=context.groups.coordinate.dp_rank, count=context.groups.layout.dp_size)


def layer_finisher(context: EngineContext, part: Zero3Partition | None) -> Callable[[nn.Module], None]:
    """Return what is done with each layer once it has its weights: under ZeRO-3 they are spread over the data group.

    With `part` each rank has its own in place; else the group's first rank sends whole parameters to the others.
    """
    if context.resolved.zero_stage < 3:
        return lambda _: None
    # without the batch sizes, which zero.Init would hold against the world's size instead of the data group's
    kept = ("zero_optimization", "bf16", "fp16", "aio")
    config = {name: value for name, value in deepspeed_config(context).items() if name in kept}
    config["train_micro_batch_size_per_gpu"] = 1
    # without a group of its own each zero.Init would make one, which DeepSpeed refuses the second time
    config["zero_optimization"] = {**config["zero_optimization"], "zero_hpz_partition_size": secondary_size(context)}
    alone = [dist.get_rank()]
    data_group = context.groups.dp_group or dist.new_group(alone, timeout=run_timeout(), use_local_synchronization=True)

    secondary = open_secondary_group(context)

    def partition(layer: Any) -> None:
        mark_leaves(layer, layer.leaves())
        spread = deepspeed.zero.Init if part is None else PartitionInPlace
        spread(
            module=layer,
            data_parallel_group=data_group,
            config_dict_or_path=config,
            dtype=context.dtype,
            zero_param_parallel_group=secondary,
        )
        malloc_trim()

    return partition


def secondary_size(context: EngineContext) -> int:
    """Return how many data-parallel ranks share a second copy of the parameters; 1 where there is none."""
    size = context.resolved.config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    return min(int(size), context.groups.layout.dp_size)


def open_secondary_group(context: EngineContext) -> dist.ProcessGroup | None:
    """Make the group of this rank that shares a second copy; all ranks call this. None where there is none.

    Its ranks are neighbours in a data-parallel group, not in the world as DeepSpeed's own are, and each run has its
    own.
    """
    size, mine = secondary_size(context), None
    if size > 1:
        for replicas in context.groups.layout.groups("data"):
            for start in range(0, len(replicas), size):
                ranks = list(replicas[start : start + size])
                group = dist.new_group(ranks, timeout=run_timeout())
                mine = group if context.groups.rank in ranks else mine
    set_secondary_group(mine)
    return mine
