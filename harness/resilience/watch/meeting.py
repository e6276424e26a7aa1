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
from harness.resilience.process import signals
from harness.resilience.process.records import HANG, THIS_RANK, Position, record_failure_of
from harness.topology.env import LaunchEnv
from harness.topology.failure import tell
from harness.topology.peers import ranks_among
from harness.topology.process_status import is_stopped
from harness.topology.processes import children_of, parent_of
from harness.uncaught import first_line, is_awaited

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

    By then this process has shown its own error; `uncaught` tells them earlier if it shows it.
    """
    try:
        yield
    except signals.Stopped:
        raise
    except BaseException as error:
        if is_awaited(env, error):
            atexit.register(tell, env, first_line(error))
        raise


def _look(met: threading.Event, hang_seconds: float, console: Console) -> None:
    since: dict[int, float] = {}
    looked = time.monotonic()
    while not met.wait(EVERY_S):
        now = time.monotonic()
        since = since if now - looked < PAUSED_S else {}
        looked = now
        ranks = _ranks_here()
        stopped = [process for process in ranks if is_stopped(process)]
        since = {process: since.get(process, now) for process in stopped}
        late = [process for process in stopped if now - since[process] > hang_seconds]
        if late and os.getpid() == min(ranks.keys() - set(stopped)):
            _end_run(ranks[late[0]], late, console)


def _ranks_here() -> dict[int, str]:
    """Return the rank of each process that this one's launcher has started here."""
    ours = os.getpid()
    return {ours: "", **ranks_among([ours, *children_of(parent_of(ours))])}


def _end_run(rank: str, late: list[int], console: Console) -> None:
    signals.say_nothing()
    message = f"rank {rank} (host {THIS_RANK.host}) is stopped (process state T), and the others wait for it"
    console.fail(message)
    record_failure_of(Position(rank=int(rank), host=THIS_RANK.host), late[0], HANG, message)
    for process in late:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    os._exit(1)
