"""Start, signal and end the ranks of one host with all that they leave behind, and note how they end.

The engine's own way does not suffice: when the first rank fails, it ends the others before they have recorded why,
keeps only that rank's exit code, and replaces the signal handlers of the launch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.console import drop_output_without_reader, print_if_heard
from harness.resilience.on_host.processes import signal_when_parent_dies, sweep
from harness.resilience.on_host.standby import DONE, Standby
from harness.topology.env import RECORDS, inherited
from harness.topology.process_status import is_stopped
from harness.topology.processes import children_of

PAUSED_S = 5.0  # after a longer gap between two checks this process was stopped itself: times start anew
LOOK_S = 0.5  # interval of checks for stopped ranks
NOT_FOUND = 127  # exit code of a command that cannot be started


class Exit(NamedTuple):
    """The end of a rank. The code is negative for a signal; the time is in seconds since the epoch.

    -SIGSTOP: it has been stopped for too long, which counts as its end.
    """

    rank: int
    code: int
    time: float


class Ranks:
    """The ranks of this host, in one start after another.

    Args:
        root: folder of their records; each start has a folder in it, by which its processes are found.
        stopped_s: a rank that has been stopped for this long counts as ended (0: never).
        preloads: whether a process that has done the imports forks them.
        spared: other processes that this one has started, which `end` must leave alone.
    """

    def __init__(
        self,
        root: Path,
        *,
        stopped_s: float,
        preloads: bool,
        spared: Sequence[int] = (),
    ) -> None:
        self.root = root
        self._stopped_s = stopped_s
        self._preloads = preloads
        self._spared = spared
        self.alive: dict[int, int] = {}  # the rank of each process
        self.exits: list[Exit] = []  # of the ranks that exited by themselves in this start
        self.records = root
        self.count = 0  # of the ranks in this start
        self._standby: Standby | None = None
        self._awaited: dict[int, tuple[int, list[str], dict[str, str]]] = {}  # ranks that the standby is to fork
        self._passed_on = 0  # the last signal to the ranks
        self._started: list[subprocess.Popen[bytes]] = []
        self._checked = time.monotonic()
        self._stopped: dict[int, float] = {}  # since when a process is stopped
        self._prepare()

    def start(self, number: int, ranks: Sequence[tuple[int, list[str], dict[str, str]]]) -> None:
        """Start ranks (number, command, environment). OSError if no folder for their records can be made."""
        self.end()
        drop_output_without_reader()  # ranks inherit these streams
        self.exits = []
        self._passed_on = 0
        self.count = len(ranks)
        self.records = self.root / f"{number:04d}"
        shutil.rmtree(self.records, ignore_errors=True)  # of a start before the store of the agents was lost
        self.records.mkdir(parents=True)
        marked = [(rank, command, {**own, RECORDS: str(self.records)}) for rank, command, own in ranks]
        self._prepare()
        if self._standby is not None and ranks and self._standby.start(marked):
            self._awaited = {each[0]: each for each in marked}
        else:
            self._start(marked)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""
        self._passed_on = number
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def look(self) -> None:
        """Note the ranks that have exited, and end those that are stopped."""
        if self._standby is not None and self._awaited:
            self._look_at_standby(self._standby)
        for process in list(self.alive):
            with suppress(ChildProcessError):  # the process that has forked it is still its parent
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self._exited(self.alive.pop(process), os.waitstatus_to_exitcode(status))
        if time.monotonic() - self._checked > LOOK_S:
            self._end_stopped()
            self._reap_orphans()
            self._checked = time.monotonic()

    def end(self) -> None:
        """Kill all processes of the current start."""
        if self._awaited:
            self._drop_standby()  # in the midst of forking
        standby = [] if self._standby is None else [self._standby.process.pid]
        sweep(str(self.root), kept=[*self._spared, *standby])
        self.alive = {}
        self._awaited = {}

    def end_slowly(self, seconds: float) -> None:
        """Let the ranks save and exit. SIGCONT first, because a stopped rank does not handle SIGTERM."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        until = time.monotonic() + seconds
        while self._processes() and time.monotonic() < until:
            time.sleep(0.1)
            self.look()

    def close(self) -> None:
        """Kill everything."""
        self._drop_standby()
        self.end()

    def _exited(self, rank: int, code: int) -> None:
        self.exits.append(Exit(rank, code, time.time()))

    def _prepare(self) -> None:
        if self._standby is not None and self._standby.has_ended():
            self._drop_standby()
        if self._preloads and self._standby is None:
            with suppress(OSError):
                self._standby = Standby(str(self.root))

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self._standby.end()
            self._standby = None

    def _start(self, ranks: Sequence[tuple[int, list[str], dict[str, str]]]) -> None:
        for rank, words, environment in ranks:
            try:
                process = subprocess.Popen(
                    words,
                    env={**inherited(), **environment},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(signal_when_parent_dies, signal.SIGTERM),
                )
            except OSError as error:
                print_if_heard(f"error: cannot start {words[0]} in {Path.cwd()}: {error.strerror}", sys.stderr)
                self._exited(rank, NOT_FOUND)
                continue
            self._started.append(process)
            self.alive[process.pid] = rank

    def _look_at_standby(self, standby: Standby) -> None:
        """Take over the ranks that the standby has forked. If it was killed before that, note the others as ended.

        If its imports have failed, start the ranks without it: they will report the error.
        """
        has_ended = standby.has_ended()
        for rank, process in standby.started():
            if rank == DONE[0]:
                self._awaited = {}
                return
            self.alive[process] = rank
            self._awaited.pop(rank, None)
        if not has_ended or not self._awaited:
            return
        missing = list(self._awaited.values())
        self._awaited = {}
        if (standby.process.poll() or 0) > 0:
            self._start(missing)
        else:
            for rank, _, _ in missing:
                self._exited(rank, -(self._passed_on or signal.SIGKILL))

    def _processes(self) -> list[int]:
        """Return the processes of the ranks, and the standby while it forks them."""
        return [*self.alive, *([self._standby.process.pid] if self._standby is not None and self._awaited else [])]

    def _end_stopped(self) -> None:
        """Count ranks as ended, and kill the standby, that have been stopped for too long.

        Before the ranks have met nobody else does, and other hosts cannot tell a stopped rank from a lost host.
        """
        now = time.monotonic()
        stopped = list(filter(is_stopped, self._processes()))
        if now - self._checked > PAUSED_S:
            self._stopped = {}
            self._checked = now
        self._stopped = {process: self._stopped.get(process, self._checked) for process in stopped}
        for process in stopped if self._stopped_s else ():
            if now - self._stopped[process] > self._stopped_s:
                if process in self.alive:  # killed with all others when they have recorded where they are
                    self._exited(self.alive.pop(process), -signal.SIGSTOP)
                else:
                    os.kill(process, signal.SIGKILL)

    def _reap_orphans(self) -> None:
        """Reap ended processes that ranks have left: they are this one's children, and a pod may have few processes."""
        standby = [] if self._standby is None else [self._standby.process.pid]
        others = {*self.alive, *self._spared, *standby}
        for process in () if self._awaited else set(children_of(os.getpid())) - others:  # else it may be a rank
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
