"""Show an error of all ranks once, and tell ranks that wait for this one why it has failed before they met.

Where a launcher ends all ranks as soon as one has failed, this is its work. `srun`, Kubernetes and a shell leave the
others waiting. Nothing here imports torch before there is somebody to talk to: a wrong flag is told in under a second.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from harness.errors import UserError
from harness.topology.env import LaunchEnv
from harness.topology.interfaces import reachable
from harness.topology.peers import POLL_S, may_come

HEARING_S = 10.0  # how long a rank waits for the error of rank 0, which has to import torch, before it shows its own
TELLING_S = 60.0  # how long a rank that has failed waits for the others, which may still be importing
WHEN = "has failed before the ranks met"


def show_and_tell(env: LaunchEnv, what: str, show: Callable[[], None]) -> None:
    """Show `what` has failed on this rank, unless rank 0 shows the same, and tell the ranks that wait for this one."""
    if env.rank == 0:
        show()
        tell(env, what)
        return
    heard = tell(env, what, HEARING_S)
    if heard != what:
        show()
    if heard is None:
        tell(env, what)


def tell(env: LaunchEnv, what: str, seconds: float = TELLING_S) -> str | None:
    """Tell the other ranks `what` has failed on this one; return what another rank has told, "" if none has.

    Returns None if nobody can be told: within so many seconds rank 0, which serves the store, has not come. Returns as
    soon as it is known that nobody will come.
    """
    # who waited has gone, or the user waits no longer
    with suppress(UserError, OSError, RuntimeError, KeyboardInterrupt):
        until = time.monotonic() + seconds
        if env.rank > 0:
            _wait_until_served(env, until)
        elif not may_come(env):
            return None
        own = f"rank {env.rank} (host {socket.gethostname()}) {WHEN}: {what}"
        first = _exchange(env, own, max(until - time.monotonic(), POLL_S))
        return "" if first == own else first.partition(f"{WHEN}: ")[2]
    return None


def _exchange(env: LaunchEnv, own: str, seconds: float) -> str:
    """Put an error of this rank into the store, and return the first one there, or rank 0's.

    Rank 0 has shown its error before, so ranks with the same one need not show it: they wait for it. It serves the
    store until all others know of a failure, for some seconds at most.
    """
    from harness.topology.rendezvous import FAILED, LAST, note_told, open_store

    store = open_store(env, timedelta(seconds=seconds), waits=env.rank > 0)
    if env.rank == 0:
        store.set(FAILED, own)
    first = store.compare_set(FAILED, "", own).decode()
    store.set(LAST, "")  # for ranks that already wait
    until = time.monotonic() + HEARING_S
    with suppress(RuntimeError):  # rank 0 has not failed, and ends for this error
        while env.rank > 0 and not first.startswith("rank 0 ") and time.monotonic() < until:
            time.sleep(POLL_S)
            first = store.get(FAILED).decode()
        note_told(store, env, seconds)
    return first


def _wait_until_served(env: LaunchEnv, until: float) -> None:
    """Wait until rank 0 serves the store; TimeoutError if it does not. torch's client would print each failed try."""
    host = reachable(env.master_addr)
    while may_come(env) and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, env.master_port), timeout=POLL_S):
            return
        time.sleep(POLL_S)
    raise TimeoutError
