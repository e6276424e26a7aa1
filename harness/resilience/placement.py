"""Find which tensor-parallel groups and pipeline neighbours cross hosts, and place ranks so that fewer do.

Tensor parallelism communicates several times a layer and should stay on the links inside a host; a pipeline sends one
activation a micro-batch and may cross hosts. The tensor axis is innermost. So if ranks fill the hosts in order, as the
deepspeed launcher places them, a tensor group crosses hosts only if a host's slots are no multiple of its size; the
remedy is to leave slots unused. Other launchers may place ranks round-robin. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from harness.errors import UserError
from harness.topology.hosts import Hosts
from harness.topology.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, and the number of ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A tensor-parallel group, or two pipeline neighbours, that are not on one host."""

    axis: Literal["tensor", "pipeline"]
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]  # index of each rank's host


def hosts_of_launch(run: Hosts) -> tuple[Host, ...]:
    """Return the hosts of a running launch, with as many slots as ranks."""
    counts = Counter(run.numbers)
    return tuple(Host(name=name, slots=counts[index]) for index, name in enumerate(run.names))


def host_of_ranks(world_size: int, hosts: Sequence[Host]) -> list[int]:
    """Return the index of each rank's host, filling the hosts in order. UserError if there are too few slots."""
    places = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
    if len(places) < world_size:
        raise UserError(
            f"{world_size} ranks need as many slots, but the {len(hosts)} hosts have {len(places)}: "
            "add hosts, or use fewer ranks"
        )
    return places[:world_size]


def crossings(layout: Layout, hosts: Sequence[Host], where: Sequence[int] | None = None) -> list[Crossing]:
    """Return all tensor groups, then all pairs of neighbouring stages, whose ranks are not on one host.

    `where` is the index of each rank's host; by default ranks fill the hosts in order.
    """
    host = host_of_ranks(layout.world_size, hosts) if where is None else where
    pairs = [pair for ranks in layout.groups("pipeline") for pair in pairwise(ranks)]
    return [
        Crossing(axis="tensor", ranks=tuple(ranks), hosts=tuple(host[rank] for rank in ranks))
        for ranks in layout.groups("tensor")
        if len({host[rank] for rank in ranks}) > 1
    ] + [
        Crossing(axis="pipeline", ranks=pair, hosts=(host[pair[0]], host[pair[1]]))
        for pair in pairs
        if host[pair[0]] != host[pair[1]]
    ]


def place(layout: Layout, hosts: Sequence[Host]) -> tuple[Host, ...] | None:
    """Return the slots to use of each host so that no tensor group crosses hosts; None if that is impossible.

    Fills each host, in order, with as many whole tensor groups as fit, until all ranks are placed.
    """
    used = []
    left = layout.world_size
    for host in hosts:
        slots = min(left, host.slots // layout.tp_size * layout.tp_size)
        left -= slots
        if slots:
            used.append(replace(host, slots=slots))
    return None if left else tuple(used)


def advise(layout: Layout, hosts: Sequence[Host], where: Sequence[int] | None = None) -> str | None:
    """Return a sentence for the user if tensor groups cross hosts, with the remedy; None if none does.

    `where` is the index of each rank's host; by default ranks fill the hosts in order.
    """
    torn = _torn(layout, hosts, where)
    if not torn:
        return None
    example = torn[0]
    names = " and ".join(dict.fromkeys(hosts[index].name for index in example.hosts))
    total = len(layout.groups("tensor"))
    ranks = ", ".join(map(str, example.ranks))
    problem = (
        f"{len(torn)} of {total} tensor-parallel groups of {layout} cross hosts (ranks {ranks}: {names}), "
        "and tensor parallelism is slow between hosts"
    )
    return f"{problem}: {_remedy(layout, hosts, where)}"


def advise_run(layout: Layout, run: Hosts) -> str | None:
    """Return what `advise` says of the hosts of a running launch."""
    return advise(layout, hosts_of_launch(run), run.numbers)


def _remedy(layout: Layout, hosts: Sequence[Host], where: Sequence[int] | None) -> str:
    if where is not None and list(where) != sorted(where) and not _torn(layout, hosts):
        return "give each host ranks that follow each other (`srun -m block`, `mpirun --map-by slot`)"
    if used := place(layout, hosts):
        chosen = "@".join(f"{host.name}:{','.join(map(str, range(host.slots)))}" for host in used)
        return f"start with --include {chosen!r}, which fills each host with whole groups"
    smaller = (
        Layout.from_world(layout.world_size, pp_size=layout.pp_size, tp_size=tensor)
        for tensor in range(layout.tp_size - 1, 0, -1)
        if layout.world_size % (layout.pp_size * tensor) == 0
    )
    fits = next(other for other in smaller if not _torn(other, hosts))  # groups of one rank never cross
    return f"set the tensor parallel size to {fits.tp_size} ({fits})"


def _torn(layout: Layout, hosts: Sequence[Host], where: Sequence[int] | None = None) -> list[Crossing]:
    return [crossing for crossing in crossings(layout, hosts, where) if crossing.axis == "tensor"]
