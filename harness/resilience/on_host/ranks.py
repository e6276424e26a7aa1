"""The ranks of one host: started, signalled, seen to end, and ended, with all that they have left behind.

The engine's own processes do not serve: when the first rank fails, it ends the others before they have recorded why,
keeps only that one's exit code, and replaces the signal handlers of the launch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.console import drop_output_without_reader, print_if_heard
from harness.resilience.on_host.processes import reap, signal_when_parent_dies, sweep
from harness.resilience.on_host.standby import DONE, Standby
from harness.topology.env import RECORDS, inherited
from harness.topology.processes import is_stopped

PAUSED_S = 5.0  # after a longer gap between two looks this process was stopped itself: times start anew
LOOK_S = 1.0  # interval of looks for stopped ranks
NOT_FOUND = 127  # exit code of a command that cannot be started


class Exit(NamedTuple):
    """The end of a rank. The code is negative for a signal; the time is in seconds since the epoch."""

    rank: int
    code: int
    time: float


class Ranks:
    """The ranks of this host, in one start after another.

    Args:
        root: folder of their records; each start has a folder in it, by which its processes are found.
        folder: in which they run.
        environment: added to that of this process.
        stopped_s: time after which ranks that are all stopped are killed (0: never). If only some are, the others
            notice.
        preloads: whether a process that has done the imports forks them.
        spared: other processes that this one has started, which `end` must leave alone.

    Attributes:
        alive: the rank of each process.
        exits: of those that exited by themselves in this start.
    """

    def __init__(
        self,
        root: Path,
        folder: str,
        environment: Mapping[str, str],
        *,
        stopped_s: float,
        preloads: bool,
        spared: Sequence[int] = (),
    ) -> None:
        self.root, self._folder, self._environment = root, folder, environment
        self._stopped_s, self._preloads, self._spared = stopped_s, preloads, spared
        self.alive: dict[int, int] = {}
        self.exits: list[Exit] = []
        self.records = root
        self._count = 0
        self._standby: Standby | None = None
        self._awaited: dict[int, tuple[int, list[str], dict[str, str]]] = {}  # ranks that the standby is to fork
        self._early: dict[int, int] = {}  # exit codes of processes whose rank is not known yet
        self._passed_on = 0  # the last signal to the ranks
        self._started: list[subprocess.Popen[bytes]] = []
        self._looked = self._went_on = time.monotonic()  # `_went_on`: when some rank was last not stopped
        self._prepare()

    @property
    def count(self) -> int:
        """How many ranks the current start has."""
        return self._count

    def start(self, number: int, ranks: Sequence[tuple[int, list[str], dict[str, str]]]) -> None:
        """Start ranks, each with its number, command and environment. OSError if no folder for records can be made."""
        self.end()
        drop_output_without_reader()  # ranks inherit these streams
        self.exits, self._passed_on, self._count = [], 0, len(ranks)
        self.records = self.root / f"{number:04d}"
        shutil.rmtree(self.records, ignore_errors=True)  # of a start before the store of the agents was lost
        self.records.mkdir(parents=True)
        marked = [(rank, command, {**own, RECORDS: str(self.records)}) for rank, command, own in ranks]
        self._prepare()
        self._went_on = time.monotonic()
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
        """Note the ranks that have exited, and end those of a host whose ranks are all stopped."""
        if self._standby is not None and self._awaited:
            self._look_at_standby(self._standby)
        self._early |= dict(reap())
        for process in self._early.keys() & self.alive.keys():
            self._exited(self.alive.pop(process), self._early.pop(process))
        if not self._awaited:
            self._early.clear()
        if time.monotonic() - self._looked > LOOK_S:
            self._end_stopped()
            self._looked = time.monotonic()

    def end(self) -> None:
        """Kill all processes of the current start."""
        if self._awaited:
            self._drop_standby()  # in the midst of forking
        standby = [] if self._standby is None else [self._standby.process.pid]
        sweep(str(self.root), kept=[*self._spared, *standby])
        self.alive, self._awaited = {}, {}

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
                self._standby = Standby(str(self.root), self._folder, self._environment)

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self._standby.end()
            self._standby = None

    def _start(self, ranks: Sequence[tuple[int, list[str], dict[str, str]]]) -> None:
        for rank, words, environment in ranks:
            try:
                process = subprocess.Popen(
                    words,
                    cwd=self._folder,
                    env={**inherited(), **self._environment, **environment},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(signal_when_parent_dies, signal.SIGTERM),
                )
            except OSError as error:
                print_if_heard(f"error: cannot start {words[0]} in {self._folder}: {error.strerror}", sys.stderr)
                self._exited(rank, NOT_FOUND)
                continue
            self._started.append(process)
            self.alive[process.pid] = rank

    def _look_at_standby(self, standby: Standby) -> None:
        """Take over the ranks that the standby has forked. If it was killed before, note the others as ended.

        Where its imports have failed, the ranks are started by themselves, and say why.
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
        missing, self._awaited = list(self._awaited.values()), {}
        if (standby.process.poll() or 0) > 0:
            self._start(missing)
        else:
            for rank, _, _ in missing:
                self._exited(rank, -(self._passed_on or signal.SIGKILL))

    def _processes(self) -> list[int]:
        """Return the processes of the ranks, and the standby while it forks them."""
        return [*self.alive, *([self._standby.process.pid] if self._standby is not None and self._awaited else [])]

    def _end_stopped(self) -> None:
        """Kill the ranks of this host if all have been stopped for too long: none of them can watch the others."""
        limit, now = self._stopped_s, time.monotonic()
        ranks = self._processes()
        if not ranks or not all(map(is_stopped, ranks)) or now - self._looked > PAUSED_S:
            self._went_on = now
        elif limit and now - self._went_on > limit:
            print_if_heard(f"error: all ranks here have been stopped for {limit:g} s: they are ended", sys.stderr)
            for process in ranks:
                os.kill(process, signal.SIGKILL)
