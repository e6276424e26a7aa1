"""Named sets of ranks, to talk within: the layout's own, and any that a program adds and removes while it
runs.

`ProcessSets(groups)` starts with "world", with "pipeline", "data" and "tensor" (the groups that this rank is
in) and with "stage:0", "stage:1", ... Adding and removing is collective: every rank of the world, member or
not, makes the same call. The calls are compared before anything is created, over a gloo group of their own,
so that ranks that disagree are told so, and a rank that never calls is named when the time is up, instead of
all of them hanging.
"""

import datetime
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from harness.errors import UserError
from harness.topology.agreement import disagreement, spell_ranks
from harness.topology.env import run_timeout
from harness.topology.groups import Groups
from harness.topology.layout import AXES


class ProcessSet:
    """Some ranks of the world under a name. Collectives are for its members; all members make the same
    calls.
    """

    def __init__(self, name: str, ranks: Sequence[int], *, me: int, group: ProcessGroup | None) -> None:
        self.name = name
        self.ranks = tuple(sorted(ranks))  # global ranks; the position is the rank within the set
        self.removed = False
        self._me = me
        self._group = group  # None for a set of one, and for a rank outside

    def included(self) -> bool:
        """Whether this process is a member."""
        return self._me in self.ranks

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this process's rank within the set, from 0. Raises UserError outside it."""
        if not self.included():
            raise UserError(f"{self!r} does not include rank {self._me}: check included() first")
        return self.ranks.index(self._me)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> torch.Tensor:
        """Reduce `tensor` over the members, in place, and return it."""
        if self._communicates():
            dist.all_reduce(tensor, op=op, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the members' tensors (equal shapes) stacked in set order: [...] -> [size, ...]."""
        if not self._communicates():
            return tensor.clone().unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.stack(parts)

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> torch.Tensor:
        """Reduce over the members and keep the own part: [size, ...] -> [...]. Raises UserError on another
        shape.
        """
        if tensor.dim() == 0 or tensor.shape[0] != self.size():
            shape = list(tensor.shape)
            raise UserError(f"reduce_scatter over {self!r} needs a first dim of {self.size()}, got shape {shape}")
        if not self._communicates():
            return tensor[0].clone()
        part = tensor.new_empty(tensor[0].numel())
        dist.reduce_scatter_tensor(part, tensor.reshape(-1), op=op, group=self._group)
        return part.view(tensor.shape[1:])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite `tensor` with that of the member whose rank within the set is `source`, and return it."""
        if not 0 <= source < self.size():
            raise UserError(f"broadcast source {source} is outside the {self.size()} ranks of {self!r}")
        if self._communicates():
            dist.broadcast(tensor, src=self.ranks[source], group=self._group)
        return tensor

    def barrier(self) -> None:
        """Wait until all members are here."""
        if self._communicates():
            dist.barrier(group=self._group)

    def dissolve(self) -> None:
        """Destroy the group of a set that nobody uses any more."""
        self.removed = True
        if self.included() and self._group is not None:
            dist.destroy_process_group(self._group)

    def _communicates(self) -> bool:
        """Whether there is anybody to talk to. Raises UserError outside the set, and once it is removed."""
        if self.removed:
            raise UserError(f"{self!r} was removed: add it again before using it")
        self.rank()
        return self.size() > 1

    def __repr__(self) -> str:
        return f"process set {self.name!r} ({spell_ranks(self.ranks)})"


class ProcessSets:
    """All process sets of a run by name. Built on every rank at the same point, as `build_groups` is."""

    def __init__(self, groups: Groups, *, timeout_s: float = 60) -> None:
        """`timeout_s`: how long a rank waits in `add` and `remove` for the others to make the same call."""
        self._groups = groups
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._alone = groups.layout.world_size == 1
        # In a monitored barrier rank 0 alone keeps its time-out; the others wait for it by the group's.
        patience = self._timeout + datetime.timedelta(seconds=2)
        self._control = None if self._alone else dist.new_group(backend="gloo", timeout=patience)
        self._sets: dict[str, ProcessSet] = {}
        layout, rank = groups.layout, groups.rank
        self._keep("world", range(layout.world_size), groups.world_group)
        for axis in AXES:
            self._keep(axis, layout.ranks_along(axis, rank), groups.along(axis))
        for stage in range(layout.pp_size):
            self._keep_stage(stage)
        self._predefined = frozenset(self._sets)

    def __getitem__(self, name: str) -> ProcessSet:
        """Return the set of that name. Raises UserError, with the names there are, for an unknown one."""
        if name not in self._sets:
            raise UserError(f"no process set {name!r}: there are {', '.join(self._sets)}")
        return self._sets[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sets

    def __iter__(self) -> Iterator[ProcessSet]:
        return iter(self._sets.values())

    def add(self, name: str, ranks: Sequence[int]) -> ProcessSet:
        """Create a set of these global ranks; every rank of the world makes the same call.

        Raises UserError, on all ranks alike, if they disagree, if the name is taken or if `ranks` is empty,
        repeats a rank or holds one outside the world.
        """
        self._agree(f"add({name!r}, {list(ranks)})")
        world = self._groups.layout.world_size
        if name in self._sets:
            raise UserError(f"there is already a {self._sets[name]!r}: remove it first, or choose another name")
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < world for rank in ranks):
            raise UserError(
                f"process set {name!r} cannot have ranks {list(ranks)}: "
                f"give at least one, each once, each from 0 to {world - 1}"
            )
        return self._keep(name, ranks, self._new_group(ranks))

    def remove(self, name: str) -> None:
        """Dissolve a set that was added; every rank of the world makes the same call.

        Raises UserError, on all ranks alike, if they disagree, or for an unknown or a predefined name.
        """
        self._agree(f"remove({name!r})")
        gone = self[name]
        if name in self._predefined:
            raise UserError(f"{gone!r} belongs to the layout: only sets that were added can be removed")
        del self._sets[name]
        gone.dissolve()

    def _agree(self, call: str) -> None:
        """Compare `call` with that of every other rank. Raises UserError if they differ or one is late."""
        if self._alone:
            return
        try:
            dist.monitored_barrier(self._control, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"not every rank called {call} within {self._timeout.total_seconds():g} s: {reason}"
            ) from error
        calls: list[str] = [""] * self._groups.layout.world_size
        dist.all_gather_object(calls, call, group=self._control)
        if told := disagreement("call on the process sets", calls):
            held = {text: [rank for rank, other in enumerate(calls) if other == text] for text in calls}
            raise UserError(f"{told}: {'; '.join(f'{spell_ranks(r)} {text}' for text, r in held.items())}")

    def _new_group(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Return a group of these ranks, as far as this rank is in it; collective over the world."""
        if len(ranks) == 1:
            return None
        group = dist.new_group(list(ranks), timeout=run_timeout())
        return group if self._groups.rank in ranks else None

    def _keep_stage(self, stage: int) -> None:
        """Return the set of one stage's ranks, by a group that the layout already has where there is one."""
        layout, mine = self._groups.layout, self._groups.coordinate.stage
        ranks = layout.stage_ranks(stage)
        if layout.pp_size == 1:
            group = self._groups.world_group
        elif layout.tp_size == 1:
            group = self._groups.dp_group if stage == mine else None
        elif layout.dp_size == 1:
            group = self._groups.tp_group if stage == mine else None
        else:
            group = self._new_group(ranks)
        self._keep(f"stage:{stage}", ranks, group)

    def _keep(self, name: str, ranks: Sequence[int], group: ProcessGroup | None) -> ProcessSet:
        self._sets[name] = ProcessSet(name, ranks, me=self._groups.rank, group=group)
        return self._sets[name]
