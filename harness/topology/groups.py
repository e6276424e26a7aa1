"""The device and the process groups of one rank, built once from a `Layout` and passed as an argument.

A group of one rank is None: no group is created, and code that gets None does not communicate. So a layout of one rank
needs no torch.distributed. Otherwise torch.distributed must be initialised with as many ranks as the layout.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from harness.errors import UserError
from harness.topology.env import run_timeout
from harness.topology.layout import AXES, Axis, Coordinate, Layout
from harness.wording import counted

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Groups:
    """One rank's device, coordinate and process groups; a group is None if its size is 1."""

    layout: Layout
    rank: int
    coordinate: Coordinate
    world_group: ProcessGroup | None
    pp_group: ProcessGroup | None  # the stages of one replica, in order
    dp_group: ProcessGroup | None  # the ranks with the same shards of the same layers
    cp_group: ProcessGroup | None  # the data-parallel ranks that read the same samples, in order of their token shards
    tp_group: ProcessGroup | None  # the ranks with the other shards of the same layers
    ep_group: ProcessGroup | None = None  # neighbours on the data axis over which whole experts are distributed
    ep_copies: ProcessGroup | None = None  # with `ep_group`: the ranks with the same experts
    loss_stage: int  # the stage with the last layers; stage 0 in a V-shaped schedule
    device: torch.device = CPU

    def along(self, axis: Axis) -> ProcessGroup | None:
        groups = {"pipeline": self.pp_group, "data": self.dp_group, "context": self.cp_group, "tensor": self.tp_group}
        return groups[axis]

    @cached_property
    def is_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.coordinate.stage == 0

    @cached_property
    def is_last_stage(self) -> bool:
        """Whether this rank reads the labels and computes the loss."""
        return self.coordinate.stage == self.loss_stage


def build_groups(layout: Layout, loss_stage: int | None = None, device: torch.device = CPU) -> Groups:
    """Create the process groups of `layout`; all ranks of the world call it.

    Args:
        loss_stage: the stage that computes the loss, by default the last.
        device: the device of this rank's tensors.

    Raises:
        UserError: the number of running ranks differs from the layout's.
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
    # new_group is collective: all ranks create the same groups in the same order, or they wait for each other for ever.
    for axis in AXES:
        # If all data-parallel ranks read the same samples, the context ranks are the data group: no second one.
        is_data = axis == "context" and layout.batch_ranks == 1
        groups[axis] = groups["data"] if is_data else _build_axis(layout.groups(axis), layout, rank)
    ep_group = _build_axis(layout.expert_groups(), layout, rank)
    ep_copies = None if ep_group is None else _build_axis(layout.expert_copies(), layout, rank)
    # DeepSpeed needs a group over which it reduces experts, even of a single rank. Each rank creates only its own:
    # without local synchronisation, all ranks would have to create the groups of all.
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
        device=device,
    )


def second_data_groups(groups: Groups) -> dict[tuple[int, ...], ProcessGroup]:
    """Create a second process group for each group of data-parallel ranks; return this rank's groups by their ranks.

    All ranks call it.
    """
    # Collectives of one group run in order. Weights that are sent in a second group do not delay the next reduction
    # over the data-parallel ranks.
    layout = groups.layout
    found = {}
    for ranks in [*layout.groups("data"), *(layout.expert_copies() if groups.ep_group is not None else [])]:
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=run_timeout())
            if groups.rank in ranks:
                found[tuple(ranks)] = group
    return found


def _build_axis(all_ranks: list[list[int]], layout: Layout, rank: int) -> ProcessGroup | None:
    """Create all groups of an axis and return this rank's; None for groups of one rank. All ranks call it."""
    mine = None
    for ranks in all_ranks:
        # All groups of an axis have one size, so the first decides for all.
        if len(ranks) == 1:
            return None
        # A second group of all ranks would only cost connections and threads.
        if len(ranks) == layout.world_size:
            return dist.group.WORLD
        # Without a timeout, a new group takes torch's default, not the one of the default group.
        group = dist.new_group(ranks, timeout=run_timeout())
        if rank in ranks:
            mine = group
    return mine
