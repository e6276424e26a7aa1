"""Find a stopped or failed rank before the process group exists.

Until then there is no `watcher`, and the others would wait long for that rank: for it to join the group, or for data
that it prepares for this host. `ds-harness launch` finds one itself; this is for `deepspeed` and other launchers.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from harness.console import Console
from harness.errors import UserError
from harness.resilience.process import signals
from harness.resilience.process.records import HANG, THIS_RANK, Position, record_failure_of
from harness.topology.env import LaunchEnv
from harness.topology.processes import children_of, is_stopped, parent_of, started_with

EVERY_S = 0.5
PAUSED_S = 5.0  # after a longer gap between two checks this process was stopped itself: times start anew


@contextmanager
def watching_for_stopped_ranks(hang_seconds: float, console: Console) -> Iterator[None]:
    """End the run if another process of this launch is stopped for longer than `hang_seconds` (0: never)."""
    met = threading.Event()
    if hang_seconds:
        threading.Thread(target=_look, args=(met, hang_seconds, console), name="meeting", daemon=True).start()
    try:
        yield
    finally:
        met.set()


@contextmanager
def telling_of_a_failure(env: LaunchEnv) -> Iterator[None]:
    """Tell the other ranks, when this process exits, if the block has failed before they met.

    By then this process has shown its own error.
    """
    try:
        yield
    except BaseException as error:
        atexit.register(tell_the_others, env, error)
        raise


def tell_the_others(env: LaunchEnv, error: BaseException) -> None:
    """Tell ranks that wait for this one why it has failed, unless the launcher ends them or they know it."""
    if env.ends_together or isinstance(error, KeyboardInterrupt | signals.Stopped):
        return
    from harness.topology.rendezvous import NotMet, tell_failure  # imports torch

    if isinstance(error, NotMet):
        return
    if isinstance(error, SystemExit):
        what = f"exit code {error.code}"
    else:
        first = (str(error).strip().splitlines() or [""])[0]
        what = first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
    tell_failure(env, f"rank {env.rank} (host {THIS_RANK.host}) has failed before the ranks met: {what}")


def _look(met: threading.Event, hang_seconds: float, console: Console) -> None:
    since: dict[int, float] = {}
    looked = time.monotonic()
    while not met.wait(EVERY_S):
        now = time.monotonic()
        since, looked = since if now - looked < PAUSED_S else {}, now
        ranks = _ranks_here()
        stopped = [process for process in ranks if is_stopped(process)]
        since = {process: since.get(process, now) for process in stopped}
        late = [process for process in stopped if now - since[process] > hang_seconds]
        if late and os.getpid() == min(ranks.keys() - set(stopped)):
            _end_run(ranks[late[0]], late, console)


def _ranks_here() -> dict[int, str]:
    """Return the rank of each process on this host that belongs to the same launch."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    ours = started_with(os.getpid())
    found = {os.getpid(): ours.get("RANK", "")}
    for process in children_of(parent_of(os.getpid())) if "RANK" in ours else []:
        theirs = started_with(process)
        if "RANK" in theirs and all(theirs.get(name) == ours.get(name) for name in names):
            found[process] = theirs["RANK"]
    return found


def _end_run(rank: str, late: list[int], console: Console) -> None:
    signals.say_nothing()
    message = f"rank {rank} (host {THIS_RANK.host}) is stopped (process state T), and the others wait for it"
    console.fail(message)
    record_failure_of(Position(rank=int(rank), host=THIS_RANK.host), late[0], HANG, message)
    for process in late:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    os._exit(1)
