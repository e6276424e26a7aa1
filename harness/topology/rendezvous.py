"""Open the key-value store in which the ranks of a run first meet.

By default torch's TCP store listens on every address of rank 0's host. Here rank 0 listens only on the master's
address, and a single process opens no port at all. torchrun's agent has a store already, which is used as it is.
"""

import os
import socket
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from harness.errors import UserError
from harness.topology.env import LaunchEnv
from harness.topology.interfaces import listen_at
from harness.topology.slurm import address_of


def open_store(env: LaunchEnv, timeout: timedelta) -> dist.Store:
    """Return the store that all ranks of the run share.

    Raises UserError if the master's address is unknown or its port is taken.
    """
    if env.world_size == 1:
        return dist.HashStore()
    if env.has_store:
        store: dist.Store = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))[0]
        store.set_timeout(timeout)
        return dist.PrefixStore("default_pg", store)  # as torch does: the launcher has keys of its own
    is_master = env.rank == 0
    env = replace(env, master_addr=_reachable(env.master_addr))
    listener = _listen(env) if is_master else None
    return dist.TCPStore(
        env.master_addr,
        env.master_port,
        env.world_size,
        is_master,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def require_one_kind(store: dist.Store, env: LaunchEnv, kind: str) -> None:
    """Raise UserError, on all ranks, if their devices are of two kinds: torch would wait until its timeout."""
    own = f"{kind} on rank {env.rank} (host {socket.gethostname()})"
    first = store.compare_set("device", "", own).decode()
    if not first.startswith(f"{kind} "):
        store.compare_set("other device", "", own)
    if store.add("devices", 1) == env.world_size:
        store.set("device of the last", store.compare_set("other device", "", first).decode())
    if (other := store.get("device of the last").decode()) != first:
        raise UserError(
            f"the ranks' devices are of different kinds, {' and '.join(sorted([first, other]))}: "
            "check the driver and CUDA_VISIBLE_DEVICES of the host without a GPU, or leave that host out"
        )


def _reachable(host: str) -> str:
    """Return the host's name, or its address by Slurm if name resolution fails. UserError if neither is known."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if (address := address_of(host)) is None:
            raise UserError(f"MASTER_ADDR {host}: no such host: {error.strerror}") from error
        return address
    return host


def _listen(env: LaunchEnv) -> socket.socket | None:
    """Listen on the master's address; None if it is not an address of this host."""
    try:
        return listen_at(env.master_addr, env.master_port, max(env.world_size, 128))
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on {env.master_addr}:{env.master_port}: {os.strerror(error.errno or 0)}; "
            "choose another port (`deepspeed --master_port`, or MASTER_PORT)"
        ) from error
