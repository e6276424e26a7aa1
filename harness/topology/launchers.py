"""The environment variables of launchers: a table for launchers of ranks, and one for launchers of hosts.

A launcher of ranks (torchrun, deepspeed, mpiexec, srun) starts every rank and sets its number. A launcher of hosts
(Kubernetes, Slurm with one task per host, a cloud's launcher) starts one process per host and sets the host's number;
that process is `ds-harness launch`, or the rank itself if each host has only one. The tables are in `launchers.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.topology.slurm import first_host, in_step, tasks_on_node

PORT = 29500  # where hosts meet if their launcher gives no port


@dataclass(frozen=True)
class Names:
    """The variables of a launcher of ranks; of several names, the first one set is used."""

    rank: str
    world_size: Sequence[str]
    local_rank: Sequence[str]
    local_world_size: Sequence[str] = ()
    launch: Sequence[str] = ()  # variables that together identify a launch


@dataclass(frozen=True, kw_only=True)
class HostNames:
    """The variables of a launcher of hosts.

    Attributes:
        rank: the number of this host.
        count: number of hosts, or least and largest number as `2:4`.
        ranks: number of ranks on each host; "auto" and the like leave it open.
        address: address of the first host, or of all hosts, one a line; or Slurm's list of hosts.
        port: port where the hosts meet.
        endpoint: address and port where the hosts meet, in one variable.
        needs: a variable that must also be set for this launcher.
    """

    launcher: str
    rank: str
    count: str
    ranks: str = ""
    address: str = ""
    port: str = ""
    endpoint: str = ""
    needs: str = ""


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PLAIN, OPEN_MPI, MVAPICH, PMI, SLURM = (
    Names(**_TABLE["ranks"][name]) for name in ("plain", "open_mpi", "mvapich", "pmi", "slurm")
)
HOST_LAUNCHERS = {key: HostNames(**row) for key, row in _TABLE["hosts"].items()}
"""Launchers of hosts, in the order in which they are tried. `pytorch_job` also covers Volcano's pytorch plugin."""


def launcher_of_ranks(environ: Mapping[str, str]) -> Names | None:
    """Return the variables of this process's launcher of ranks; None without one.

    Raises UserError for PMIx alone, which does not set the number of ranks.
    """
    if "RANK" in environ:
        return PLAIN
    for names in (OPEN_MPI, MVAPICH):
        if names.rank in environ:
            return names
    by_srun = [environ.get(name) for name in (SLURM.rank, SLURM.world_size[0])]
    # `srun --mpi=pmi2` sets PMI's variables to the values of its own, which say more (the local rank).
    if PMI.rank in environ and by_srun != [environ.get(name) for name in (PMI.rank, *PMI.world_size)]:
        return PMI
    if in_step(environ):
        return SLURM
    if "PMIX_RANK" in environ:
        raise UserError("PMIX_RANK is set, but the number of ranks is not: set RANK, WORLD_SIZE and LOCAL_RANK")
    return PLAIN if "WORLD_SIZE" in environ else None


@dataclass(frozen=True, kw_only=True)
class HostAssignment:
    """This host's number and the number of hosts, as set by a launcher of hosts.

    Attributes:
        rank: number of this host; None if the hosts agree on their order themselves.
        nodes: number of hosts, or a range such as `2:4`.
        ranks: number of ranks on this host; None if not given.
        endpoint: HOST:PORT where the hosts meet.
    """

    launcher: str
    rank: int | None
    nodes: str
    ranks: int | None
    endpoint: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> HostAssignment | None:
        """Return the assignment of this host; None if no launcher of hosts started this process."""
        for name, names in HOST_LAUNCHERS.items():
            if names.needs and names.needs not in environ:
                continue
            nodes = environ.get(names.count, "")
            rank = environ.get(names.rank, "")
            addresses = environ.get(names.address, "")
            address = first_host(addresses) if name == "slurm" else next(iter(addresses.split()), "")
            endpoint = environ.get(names.endpoint, "") if names.endpoint else ""
            endpoint = endpoint or (f"{address}:{environ.get(names.port) or PORT}" if address else "")
            # A single host has nobody to meet. Only torchrun's hosts agree on their numbers themselves.
            if nodes in ("", "1", "1:1") or not endpoint or (not rank and name != "torchrun"):
                continue
            # With several tasks on a host, srun has started the ranks themselves.
            if name == "slurm" and _tasks_here(environ) != 1:
                continue
            # Started by torchrun inside the pod: RANK is the number of a rank, not of a pod.
            if name == "pytorch_job" and "LOCAL_RANK" in environ:
                continue
            ranks = environ.get(names.ranks, "")
            return cls(
                launcher=names.launcher,
                rank=int(rank) if rank.isdigit() else None,
                nodes=nodes,
                ranks=int(ranks) if ranks.isdigit() and int(ranks) else None,
                endpoint=endpoint if ":" in endpoint else f"{endpoint}:{PORT}",
            )
        return None


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = environ.get("SLURM_NODEID", "0")
    return tasks_on_node(counts, int(node) if node.isdigit() else 0)
