"""The process on each host that starts the ranks there: `python -m harness.resilience.on_host.agent`.

It reads lines from its standard input and writes lines to its standard output; both are a pipe to the supervisor, by
way of ssh or srun for another host. When the input ends, the supervisor is gone: the ranks get SIGTERM, and SIGKILL if
they are still there after a while.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

from harness.console import print_if_heard
from harness.resilience.on_host.messages import MARK, LineReader, Order, Preparation, read_message
from harness.resilience.on_host.processes import become_subreaper, end_with_parent, reap, sweep
from harness.resilience.on_host.standby import Standby
from harness.topology.env import inherited
from harness.topology.processes import status_of, wait_readable

BEAT_S = 1.0  # interval of heartbeats to the supervisor
SILENT_S = 60.0  # a supervisor on another host that sends nothing for so long is taken for gone
GRACE_S = 60.0  # time for ranks to save after the supervisor is gone
PAUSED_S = 5.0  # after a longer gap between two looks the agent was stopped itself: times start anew
NOT_FOUND = 127  # exit code of a command that cannot be started


class Agent:
    """Starts ranks, passes signals on to them, and reports their exits."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.alive: dict[int, int] = {}  # rank of each process
        self.received: list[int] = []  # signals to this process
        self._standby: Standby | None = None
        self._awaited: set[int] = set()  # ranks that the standby process will become
        self._early: dict[int, int] = {}  # exit codes of processes whose rank is not known yet
        self._passed_on = 0  # the last signal to the ranks
        self._started: list[subprocess.Popen[bytes]] = []
        self._heard, self._beat = time.monotonic(), 0.0
        self._went_on = time.monotonic()  # last time at which some rank was not stopped
        self._input = LineReader(0)

    def run(self) -> None:
        """Follow the supervisor's lines until it ends the attempt, or is gone."""
        self.report()
        while not (self._input.is_closed or self._is_forgotten()):
            wait_readable([0], 0.05)
            for line in self._input.read():
                self._heard = time.monotonic()
                if line.startswith("{"):
                    self.follow(read_message(line))
                elif line == str(int(signal.SIGKILL)):
                    return
                elif line != "0":
                    self.signal(int(line))
            while self.received:
                self.signal(self.received.pop(0))
            self.look()
        self._end_slowly()
        if self.order is not None and not self.order.is_remote:
            sweep(self.order.records)
            shutil.rmtree(self.order.root, ignore_errors=True)  # the supervisor is gone and cannot do it

    def report(self, **what: object) -> None:
        """Write a report to the supervisor; without arguments a heartbeat."""
        self._beat = time.monotonic()
        with suppress(OSError):
            os.write(1, f"{MARK}{json.dumps({**what, 'time': time.time()})}\n".encode())

    def follow(self, message: Preparation | Order) -> None:
        """Prepare a start, or start the ranks. Kills what an earlier attempt has left here first."""
        if not isinstance(message, Order):
            with suppress(OSError):
                self._standby = Standby(message)
            return
        sweep(message.root, spared=message.records)
        self.order = message
        if self._standby is not None and self._standby.start(message):
            self._awaited = {rank for rank, _, _ in message.ranks}
        else:
            self._start(message)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""
        self._passed_on = number
        for process in self._ranks():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def look(self) -> None:
        """Report ranks that have exited, and send a heartbeat when it is due."""
        if self._standby is not None:
            self._look_at_standby(self._standby)
        self._early |= dict(reap())
        for process in self._early.keys() & self.alive.keys():
            self.report(rank=self.alive.pop(process), code=self._early.pop(process))
        if not self._awaited:
            self._early.clear()
        if time.monotonic() - self._beat > BEAT_S:
            self._end_stopped()
            self.report()

    def end(self) -> None:
        """Kill all processes of the attempt on this host."""
        if self._standby is not None:
            self._standby.end()
        if self.order is not None:
            sweep(self.order.records)

    def _start(self, order: Order) -> None:
        for rank, command, environment in order.ranks:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=order.folder,
                    env={**inherited(), **order.environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=order.out,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                print_if_heard(f"error: cannot start {command[0]} in {order.folder}: {error.strerror}", sys.stderr)
                self.report(rank=rank, code=NOT_FOUND)
                continue
            self._started.append(process)
            self.alive[process.pid] = rank

    def _look_at_standby(self, standby: Standby) -> None:
        """Take over the ranks that the standby has forked. If it died before, report the missing ones as ended."""
        has_ended = standby.has_ended()
        for rank, process in standby.started():
            self.alive[process] = rank
            self._awaited.discard(rank)
        if has_ended and self._awaited:
            for rank in self._awaited:
                self.report(rank=rank, code=-(self._passed_on or signal.SIGKILL))
            self._awaited = set()

    def _ranks(self) -> list[int]:
        """Return the processes of the ranks, and the standby while it is becoming ranks."""
        return [*self.alive, *([self._standby.process.pid] if self._standby is not None and self._awaited else [])]

    def _end_stopped(self) -> None:
        """Kill the ranks of this host if all have been stopped for too long: none of them can watch the others."""
        limit, now = self.order.stopped_s if self.order is not None else 0.0, time.monotonic()
        if not (ranks := self._ranks()) or not all(map(_is_stopped, ranks)) or now - self._beat > PAUSED_S:
            self._went_on = now
        elif limit and now - self._went_on > limit:
            print_if_heard(f"error: all ranks here have been stopped for {limit:g} s: they are ended", sys.stderr)
            for process in ranks:
                os.kill(process, signal.SIGKILL)

    def _is_forgotten(self) -> bool:
        is_remote = self.order is not None and self.order.is_remote
        return is_remote and time.monotonic() - self._heard > SILENT_S

    def _end_slowly(self) -> None:
        """Let the ranks save and exit. SIGCONT first, because a stopped rank does not handle SIGTERM."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while self.alive and time.monotonic() < until:
            time.sleep(0.1)
            self.look()


def _is_stopped(process: int) -> bool:
    try:
        status = status_of(process)
    except OSError:  # not to be known here
        return False
    return status is not None and status.state == "T"


def main() -> None:
    """Run an agent until its supervisor ends it."""
    become_subreaper()
    agent = Agent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: agent.received.append(number))
    try:
        agent.run()
    finally:
        agent.end()


if __name__ == "__main__":
    main()
