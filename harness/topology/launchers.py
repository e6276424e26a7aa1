"""The environment variables of launchers: one table for launchers of ranks, one for launchers of hosts.

A launcher of ranks (torchrun, deepspeed, mpiexec, srun) starts every rank and tells it its number. A launcher of hosts
(Kubernetes, Slurm with one task a host, a cloud's launcher) starts one process on each host and tells it the host's
number; that process is `ds-harness launch`, or a rank itself if each host has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import UserError
from harness.topology.slurm import first_host, in_step, tasks_on_node

IN_POD = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every container
PORT = 29500  # where hosts meet if their launcher gives no port


@dataclass(frozen=True)
class Names:
    """The variables of a launcher of ranks; of several names the first one that is set is used."""

    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    launch: tuple[str, ...] = ()  # together they identify a launch


PLAIN = Names("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
OPEN_MPI = Names(
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
MVAPICH = Names(
    "MV2_COMM_WORLD_RANK",
    ("MV2_COMM_WORLD_SIZE",),
    ("MV2_COMM_WORLD_LOCAL_RANK",),
    ("MV2_COMM_WORLD_LOCAL_SIZE",),
)
PMI = Names(
    "PMI_RANK",
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
SLURM = Names(
    "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (), ("SLURM_JOB_ID", "SLURM_STEP_ID")
)


def launcher_of_ranks(environ: Mapping[str, str]) -> Names | None:
    """Return the variables of the launcher that started this process; None if no launcher of ranks did.

    Raises UserError for PMIx alone, which does not give the number of ranks.
    """
    if "RANK" in environ:
        return PLAIN
    for names in (OPEN_MPI, MVAPICH):
        if names.rank in environ:
            return names
    by_srun = [environ.get(name) for name in (SLURM.rank, SLURM.world_size[0])]
    if PMI.rank in environ and by_srun != [environ.get(name) for name in (PMI.rank, *PMI.world_size)]:
        return PMI  # unless they come from `srun --mpi=pmi2`: Slurm's own variables say more
    if in_step(environ):
        return SLURM
    if "PMIX_RANK" in environ:
        raise UserError("PMIX_RANK is set, but the number of ranks is not: set RANK, WORLD_SIZE and LOCAL_RANK")
    return PLAIN if "WORLD_SIZE" in environ else None


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


TORCHRUN = HostNames(
    launcher="Kubeflow or torchrun",
    rank="PET_NODE_RANK",
    count="PET_NNODES",
    ranks="PET_NPROC_PER_NODE",
    address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    endpoint="PET_RDZV_ENDPOINT",
)
PYTORCH_JOB = HostNames(  # and Volcano's pytorch plugin: RANK counts pods there
    launcher="PyTorchJob or Volcano",
    rank="RANK",
    count="WORLD_SIZE",
    address="MASTER_ADDR",
    port="MASTER_PORT",
    needs=IN_POD,
)
JOB_SET = HostNames(
    launcher="JobSet",
    rank="JOB_COMPLETION_INDEX",
    count="NNODES",
    ranks="NPROC_PER_NODE",
    address="MASTER_ADDR",
    port="MASTER_PORT",
)
SKYPILOT = HostNames(
    launcher="SkyPilot",
    rank="SKYPILOT_NODE_RANK",
    count="SKYPILOT_NUM_NODES",
    ranks="SKYPILOT_NUM_GPUS_PER_NODE",
    address="SKYPILOT_NODE_IPS",
)
DSTACK = HostNames(
    launcher="dstack",
    rank="DSTACK_NODE_RANK",
    count="DSTACK_NODES_NUM",
    ranks="DSTACK_GPUS_PER_NODE",
    address="DSTACK_MASTER_NODE_IP",
)
SLURM_HOSTS = HostNames(
    launcher="Slurm",
    rank="SLURM_NODEID",
    count="SLURM_STEP_NUM_NODES",
    ranks="SLURM_GPUS_ON_NODE",
    address="SLURM_STEP_NODELIST",
    needs="SLURM_STEP_ID",
)
HOST_LAUNCHERS = (TORCHRUN, PYTORCH_JOB, JOB_SET, SKYPILOT, DSTACK, SLURM_HOSTS)


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """The place of this host, from a launcher of hosts.

    Attributes:
        rank: number of this host; None if the hosts agree on an order themselves.
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
    def from_environ(cls, environ: Mapping[str, str]) -> HostPlace | None:
        """Return the place of this host among several; None if no launcher of hosts started this process."""
        for names in HOST_LAUNCHERS:
            if names.needs and names.needs not in environ:
                continue
            nodes, place = environ.get(names.count, ""), environ.get(names.rank, "")
            address = _first(names, environ.get(names.address, ""))
            endpoint = environ.get(names.endpoint, "") if names.endpoint else ""
            endpoint = endpoint or (f"{address}:{environ.get(names.port) or PORT}" if address else "")
            if nodes in ("", "1", "1:1") or not endpoint or (not place and names is not TORCHRUN):
                continue
            if names is SLURM_HOSTS and _tasks_here(environ) != 1:
                continue  # srun has started the ranks themselves
            if names is PYTORCH_JOB and "LOCAL_RANK" in environ:
                continue  # started by torchrun inside the pod: RANK is a rank, not a pod
            ranks = environ.get(names.ranks, "")
            return cls(
                launcher=names.launcher,
                rank=int(place) if place.isdigit() else None,
                nodes=nodes,
                ranks=int(ranks) if ranks.isdigit() and int(ranks) else None,
                endpoint=endpoint if ":" in endpoint else f"{endpoint}:{PORT}",
            )
        return None


def _first(names: HostNames, addresses: str) -> str:
    """Return the first address of a list."""
    if names is SLURM_HOSTS:
        return first_host(addresses) if addresses else ""
    return addresses.split()[0] if addresses.split() else ""


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    counts, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "0")
    return tasks_on_node(counts, int(node) if node.isdigit() else 0)
