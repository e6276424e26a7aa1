"""Open the key-value store in which the ranks of a run first meet.

By default torch's TCP store listens on every address of rank 0's host. Here rank 0 listens only on the master's
address, and a single process opens no port at all. The store of torchrun's agent is used if there is one.

A rank that fails before the ranks meet tells the others through the store, as they would wait for it (`failure`).
"""

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from harness.errors import NotMet, UserError
from harness.topology.env import LaunchEnv
from harness.topology.interfaces import listen_at, reachable
from harness.topology.peers import POLL_S, may_come

LAST = "device of the last"  # key: the kind of device of the last rank to arrive; "" if a rank has failed
FAILED = "failed"  # key: the message of a failed rank
TOLD = "told"  # key: the number of ranks that know it
READING_S = 5.0  # how long rank 0, which serves the store, waits for the others to read that a rank has failed


def open_store(env: LaunchEnv, timeout: timedelta, *, waits: bool = True) -> dist.Store:
    """Return the store shared by all ranks of the run; with `waits`, rank 0 waits until all others have opened it.

    Raises UserError if the master's address is unknown or its port is taken.
    """
    if env.world_size == 1:
        return dist.HashStore()
    if env.has_store:
        store: dist.Store = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))[0]
        store.set_timeout(timeout)
        # As torch does: the launcher has keys of its own in the store.
        return dist.PrefixStore("default_pg", store)
    is_master = env.rank == 0
    env = replace(env, master_addr=reachable(env.master_addr))
    listener = _listen(env) if is_master else None
    return dist.TCPStore(
        env.master_addr,
        env.master_port,
        env.world_size,
        is_master,
        timeout=timeout,
        wait_for_workers=waits,
        # Detached, because the store closes the descriptor.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def require_one_kind(store: dist.Store, env: LaunchEnv, kind: str) -> None:
    """Raise NotMet on all ranks if their devices are of different kinds, or if a rank has failed."""
    # Between backends of different kinds, torch would wait until its timeout.
    # The first rank sets "device"; any rank of another kind sets "other device"; the last one publishes the verdict.
    own = f"{kind} on rank {env.rank} (host {socket.gethostname()})"
    first = store.compare_set("device", "", own).decode()
    if not first.startswith(f"{kind} "):
        store.compare_set("other device", "", own)
    if store.add("devices", 1) == env.world_size:
        store.set(LAST, store.compare_set("other device", "", first).decode())
    other = store.get(LAST).decode()
    if store.check([FAILED]):
        note_told(store, env, READING_S)
        raise NotMet(store.get(FAILED).decode())
    if other != first:
        raise NotMet(
            f"the ranks' devices are of different kinds, {' and '.join(sorted([first, other]))}: "
            "check the driver and CUDA_VISIBLE_DEVICES of the host without a GPU, or leave that host out"
        )


def note_told(store: dist.Store, env: LaunchEnv, seconds: float) -> None:
    """Count this rank among the ranks that know of a failure. Rank 0 then waits for the others."""
    known = store.add(TOLD, 1)
    until = time.monotonic() + seconds
    while env.rank == 0 and known < env.world_size and time.monotonic() < until and may_come(env):
        time.sleep(POLL_S)
        known = store.add(TOLD, 0)


def _listen(env: LaunchEnv) -> socket.socket | None:
    """Listen on the master's address; None if it is not an address of this host."""
    try:
        # A queue for all ranks, which connect at about the same time.
        return listen_at(env.master_addr, env.master_port, max(env.world_size, 128))
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on {env.master_addr}:{env.master_port}: {os.strerror(error.errno or 0)}; "
            "choose another port (`deepspeed --master_port`, or MASTER_PORT)"
        ) from error
