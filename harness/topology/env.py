"""Read the environment: this process's rank and rendezvous from the launcher's variables. No other module reads it.

The variables' names are in `launchers`. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT override a launcher's
own variables. A process without any of them runs alone, as rank 0 of 1.
"""

import os
import random
import socket
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from harness.errors import UserError
from harness.topology.interfaces import interface_to, require_interfaces
from harness.topology.launchers import MVAPICH, OPEN_MPI, PLAIN, PMI, SLURM, HostAssignment, Names, launcher_of_ranks
from harness.topology.processes import DEEPSPEED_LAUNCH, ancestor
from harness.topology.slurm import first_host, in_step, tasks_on_node

LOOPBACK = "127.0.0.1"
TIMEOUT_MINUTES = 30
DEEPSPEED_PORT = 29500  # the default of its launcher's --master_port
ACCELERATOR = "DS_ACCELERATOR"  # what DeepSpeed is to run on, whatever it finds
RECORDS = "DS_HARNESS_RECORDS"  # folder in which the ranks of one attempt leave records for their supervisor
SECRET = "DS_HARNESS_SECRET"  # known to the agents and ranks of one run alone; signs what they send each other
MOST = 10**9  # of any number that a launcher gives
# For runs without a given port. By default Linux assigns ports from 32768 on to clients.
PORTS = range(15000, 31000)


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """The rank of a process and its rendezvous; the defaults describe a process that runs alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # index among the ranks of this host, and of its device
    local_world_size: int = 1  # number of ranks on this host
    master_addr: str = LOOPBACK
    master_port: int = 0  # 0: not given, `export` takes a free one
    launched: bool = False  # whether a launcher started this process
    has_store: bool = False  # whether the launcher itself serves the rendezvous store
    parent: str = ""  # the launcher whose process is this one's parent: ds-harness, torchrun, mpi or slurm

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LaunchEnv":
        """Read the launcher's variables. Raises UserError for a variable that is missing, not a number or too large."""
        host = HostAssignment.from_environ(environ)
        names = launcher_of_ranks(environ)
        # PyTorchJob sets RANK and WORLD_SIZE too, but numbers hosts by them; a launcher of ranks also sets LOCAL_RANK.
        if host is not None and (names is None or (names is PLAIN and "LOCAL_RANK" not in environ)):
            return cls._only_rank_of(host)
        if names is None:
            return cls()
        parents = {RECORDS: "ds-harness", "TORCHELASTIC_RUN_ID": "torchrun"}
        parents.update(dict.fromkeys((OPEN_MPI.rank, MVAPICH.rank, PMI.rank), "mpi"))
        parent = next((launcher for name, launcher in parents.items() if name in environ), "")
        rank = _number(environ, "RANK", names.rank)
        world_size = _world_size(environ, names)
        local_rank = _number(environ, "LOCAL_RANK", *names.local_rank)
        local_size = _number(environ, *PLAIN.local_world_size, *names.local_world_size)
        if names is SLURM and local_size is None:
            counts = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
            local_size = tasks_on_node(counts, _number(environ, "SLURM_NODEID") or 0)
        if local_size is None:
            local_size = world_size  # unknown: assume one host
        address, port = _master(environ, names, one_host=local_size == world_size)
        given = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        missing = [name for name, value in given.items() if value is None]
        # The same as `if missing`, but after it the types are known not to be None.
        if rank is None or world_size is None or local_rank is None or address is None or port is None:
            raise UserError(
                f"{' and '.join(missing)} not set, but other launcher variables are: start through "
                "`deepspeed` or `torchrun`, or unset RANK and WORLD_SIZE to run one process"
                if names is PLAIN
                else f"{names.rank} is set, but other variables are missing: set {' and '.join(missing)} for all ranks"
            )
        assert local_size is not None  # world_size is not None here
        for what, index, size in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_size)):
            if not 0 <= index < size:
                raise UserError(f"{what} is {index}, outside the {size} ranks of the launcher")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_size,
            master_addr=address,
            master_port=port,
            launched=True,
            parent=parent or ("slurm" if in_step(environ) else ""),
            # torchrun's agent already listens on the master's port.
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @classmethod
    def _only_rank_of(cls, host: HostAssignment) -> "LaunchEnv":
        """Return the environment of a host's only rank. Raises UserError if the host has several ranks."""
        address, _, port = host.endpoint.rpartition(":")
        if host.rank is None or not host.nodes.isdigit() or (host.ranks or 1) > 1:
            raise UserError(
                f"{host.launcher} has started one process on each of {host.nodes} hosts, which have "
                f"{host.ranks or 'several'} ranks: let it start `ds-harness launch`, which starts the ranks"
            )
        size = int(host.nodes)
        if not host.rank < size:
            raise UserError(
                f"{host.launcher} says that this is host {host.rank} of {size}: host numbers must start at 0"
            )
        return cls(
            rank=host.rank, world_size=size, master_addr=address, master_port=int(port), launched=True, parent="hosts"
        )

    @property
    def ends_together(self) -> bool:
        """Whether the launcher ends all ranks once one fails; srun and Kubernetes leave the others waiting.

        True for a process that runs alone.
        """
        return (
            self.world_size == 1 or self.parent in ("ds-harness", "torchrun", "mpi") or ancestor(DEEPSPEED_LAUNCH) > 0
        )

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are on this host: ranks elsewhere could not reach the master's address."""
        return self.world_size == 1 or self.master_addr in ("localhost", "::1") or self.master_addr.startswith("127.")

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables that torch.distributed and DeepSpeed read; a process that runs alone gets a free port.

        Raises UserError if a variable names a network interface that does not exist.
        """
        require_interfaces(environ)
        environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port or free_port()),
        )
        # Each rank listens, even a single process. By default gloo takes the interface of the host's own name, which is
        # often not the one that leads to the other hosts.
        name = interface_to(LOOPBACK if self.on_one_host else self.master_addr, self.master_port)
        if name is not None:
            environ.setdefault("GLOO_SOCKET_IFNAME", name)


def run_timeout() -> timedelta:
    """Return the timeout of collectives: DEEPSPEED_TIMEOUT minutes, by default 30.

    Raises UserError unless it is a whole number of at least 1.
    """
    minutes = _number(os.environ, "DEEPSPEED_TIMEOUT")
    if minutes is not None and minutes < 1:
        raise UserError(f"DEEPSPEED_TIMEOUT is {minutes}: give a number of minutes of at least 1")
    return timedelta(minutes=minutes or TIMEOUT_MINUTES)


def run_secret() -> str:
    """Return the secret of this run; "" without one."""
    return os.environ.get(SECRET, "")


def records_folder() -> Path | None:
    """Return the folder for this rank's records; None without a supervisor."""
    folder = os.environ.get(RECORDS)
    return Path(folder) if folder else None


def inherited(*prefixes: str) -> dict[str, str]:
    """Return this process's environment for a child process; with `prefixes`, only variables that begin with one."""
    return {name: value for name, value in os.environ.items() if not prefixes or name.startswith(prefixes)}


def replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """In this context, set environment variables for processes started in it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        replace_environment(before)


def cache_folder() -> Path:
    """Return the folder for cached files: ds-harness in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds-harness"


def _world_size(environ: Mapping[str, str], names: Names) -> int | None:
    """Return the number of ranks. UserError if WORLD_SIZE contradicts the launcher's own variable."""
    stated = _number(environ, "WORLD_SIZE")
    announced = _number(environ, *names.world_size)
    if stated is not None and announced is not None and stated != announced:
        raise UserError(
            f"WORLD_SIZE is {stated}, but {names.world_size[0]} says {announced}: unset it, or start {stated} ranks"
        )
    return announced if stated is None else stated


def _master(environ: Mapping[str, str], names: Names, *, one_host: bool) -> tuple[str | None, int | None]:
    """Return address and port of rank 0, as given or as derived equally on every rank; None for an unknown one."""
    address = environ.get("MASTER_ADDR")
    port = _number(environ, "MASTER_PORT")
    if names is PLAIN:
        if one_host and port == DEEPSPEED_PORT and (launch := ancestor(DEEPSPEED_LAUNCH)):
            # With DeepSpeed's default port, two runs on a host would collide.
            port = _port_of(f"deepspeed {launch}")
        return address, port
    if address is None and one_host:
        address = LOOPBACK
    elif address is None and names is SLURM:
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        address = first_host(hosts) if hosts else None
    if port is None:
        launch_id = " ".join(environ[name] for name in names.launch if name in environ)
        if not launch_id and one_host and (proxy := ancestor("hydra_pmi_proxy")):
            launch_id = f"hydra {proxy}"
        port = _port_of(launch_id) if launch_id else None
    return address, port


def _port_of(launch: str) -> int:
    # All ranks must derive the same port, and Python's `hash` differs between processes.
    return PORTS[zlib.crc32(launch.encode()) % len(PORTS)]


def free_port() -> int:
    """Return a TCP port that is free now, outside the range that the system assigns to clients. It is not reserved.

    Raises UserError if a hundred random ports are taken.
    """
    # Not the global generator: programs that seed it alike would all choose the same ports.
    for port in random.SystemRandom().sample(PORTS, 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise UserError("no port is free: give --master_port")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first of `names` that is set, or None. Raises UserError unless it is an integer."""
    for name in names:
        if name in environ:
            try:
                value = int(environ[name])
            except ValueError:
                raise UserError(f"{name} is {environ[name]!r}: set a whole number") from None
            if abs(value) > MOST or (name.endswith("_PORT") and not 0 <= value < 2**16):
                raise UserError(
                    f"{name} is {value}: {'a port is below 65536' if name.endswith('_PORT') else 'too large'}"
                )
            return value
    return None


def use_one_core_for_tokenizers() -> None:
    """Keep the tokenizers library from starting threads: each core already has a process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
