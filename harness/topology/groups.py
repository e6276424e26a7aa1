"""The live process groups of one rank, built once from a `Layout` and passed on as an argument.

A group of one rank is `None`: nothing is created for it, and code that gets `None` does not communicate. A
layout of one rank therefore needs no torch.distributed at all. Otherwise torch.distributed must be
initialised, and its world must be the layout's.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from harness.errors import UserError
from harness.topology.env import run_timeout
from harness.topology.layout import AXES, Axis, Coordinate, Layout
from harness.wording import counted


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What one rank needs to know to talk to the others; a group in which it would be alone is None."""

    layout: Layout
    rank: int
    coordinate: Coordinate
    world_group: ProcessGroup | None
    pp_group: ProcessGroup | None  # the stages of one replica, in order
    dp_group: ProcessGroup | None  # the replicas of this rank's shard
    cp_group: ProcessGroup | None  # those of them that read the same samples, in order of their stretches
    tp_group: ProcessGroup | None  # the shards of this rank's layers
    ep_group: ProcessGroup | None = None  # the neighbours on the data axis that share out whole experts
    ep_copies: ProcessGroup | None = None  # with `ep_group`: the ranks with the same experts
    loss_stage: int  # it has the last layers

    def along(self, axis: Axis) -> ProcessGroup | None:
        """Return this rank's group along `axis`."""
        groups = {"pipeline": self.pp_group, "data": self.dp_group, "context": self.cp_group, "tensor": self.tp_group}
        return groups[axis]

    @property
    def first_of_copies(self) -> bool:
        """Whether no earlier data-parallel rank holds the experts of this one."""
        return self.coordinate.dp_rank < self.layout.ep_data_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.coordinate.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank reads the labels and computes the loss."""
        return self.coordinate.stage == self.loss_stage


def build_groups(layout: Layout, loss_stage: int | None = None) -> Groups:
    """Create the process groups of `layout`; every rank of the world calls this, at the same point.

    The loss is computed on `loss_stage`, the last one unless it says otherwise.

    Raises UserError if the running world has another number of ranks than the layout.
    """
    running = dist.get_world_size() if dist.is_initialized() else 1
    if running != layout.world_size:
        are = "is" if running == 1 else "are"
        raise UserError(
            f"layout {layout} is for {counted(layout.world_size, 'rank')}, but {running} {are} running: "
            "start as many processes, or change the pipeline and tensor parallel sizes"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups: dict[Axis, ProcessGroup | None] = {}
    for axis in AXES:  # all ranks in the same order
        is_data = axis == "context" and layout.readers == 1
        groups[axis] = groups["data"] if is_data else _build_axis(layout.groups(axis), layout, rank)
    ep_group = _build_axis(layout.expert_groups(), layout, rank)
    ep_copies = None if ep_group is None else _build_axis(layout.expert_copies(), layout, rank)
    if ep_group is not None and ep_copies is None:
        ep_copies = dist.new_group([rank], timeout=run_timeout(), use_local_synchronization=True)
    return Groups(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        world_group=dist.group.WORLD if layout.world_size > 1 else None,
        pp_group=groups["pipeline"],
        dp_group=groups["data"],
        cp_group=groups["context"],
        tp_group=groups["tensor"],
        ep_group=ep_group,
        ep_copies=ep_copies,
        loss_stage=layout.pp_size - 1 if loss_stage is None else loss_stage,
    )


def _build_axis(all_ranks: list[list[int]], layout: Layout, rank: int) -> ProcessGroup | None:
    """Return this rank's one of the groups. All ranks create all of them, in one order, as new_group demands."""
    mine = None
    for ranks in all_ranks:
        if len(ranks) == 1:
            return None
        if len(ranks) == layout.world_size:
            return dist.group.WORLD
        group = dist.new_group(ranks, timeout=run_timeout())
        if rank in ranks:
            mine = group
    return mine
