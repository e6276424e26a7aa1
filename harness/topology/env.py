"""What the launcher told this process: the one place that reads the launcher's environment variables.

Knows the names that the deepspeed launcher and torchrun set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT; LOCAL_WORLD_SIZE from torchrun, LOCAL_SIZE from deepspeed) and those of Open MPI for the ranks.
A process without any of them runs alone: it is rank 0 of 1.
"""

import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from harness.config.errors import UserError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """One process's place in the launch; the defaults are a process that runs alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of this host: the number of its device
    local_world_size: int = 1  # ranks on this host
    master_addr: str = LOOPBACK
    master_port: int = 0  # 0: none given, `export` takes a free one
    launched: bool = False  # whether a launcher started this process
    has_store: bool = False  # whether the launcher itself serves the store that ranks meet in

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LaunchEnv":
        """Read the launcher's variables; UserError names one that is missing, no number or out of range."""
        rank = _number(environ, "RANK", "OMPI_COMM_WORLD_RANK")
        world_size = _number(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
        if rank is None and world_size is None:
            return cls()
        local_rank = _number(environ, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
        address, port = environ.get("MASTER_ADDR"), _number(environ, "MASTER_PORT")
        given = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        missing = [name for name, value in given.items() if value is None]
        if rank is None or world_size is None or local_rank is None or address is None or port is None:
            raise UserError(
                f"{' and '.join(missing)} not set, but other variables of a launcher are: start through "
                "`deepspeed` or `torchrun`, or unset RANK and WORLD_SIZE to run one process"
            )
        local_size = _number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
        local_size = world_size if local_size is None else local_size  # unknown: taken for one host
        for what, index, size in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_size)):
            if not 0 <= index < size:
                raise UserError(f"{what} is {index}, outside the {size} ranks that the launcher announced")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_size,
            master_addr=address,
            master_port=port,
            launched=True,
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",  # torchrun
        )

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables that torch.distributed and DeepSpeed read; a process alone gets a free port."""
        environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port or free_port()),
        )
        one_host = (
            self.world_size == 1 or self.master_addr in ("localhost", "::1") or self.master_addr.startswith("127.")
        )
        if one_host and any(name == LOOPBACK_INTERFACE for _, name in socket.if_nameindex()):
            environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)  # each rank listens, even a process alone


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port that nobody listens on now; it is not reserved."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of `names` that is set."""
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise UserError(f"{name} is {environ[name]!r}: a launcher sets a whole number here") from None
    return None
