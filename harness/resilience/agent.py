"""The process on each host that starts the ranks there: `python -m harness.resilience.agent`.

It reads lines from its standard input and writes lines to its standard output; both are a pipe to the supervisor, by
way of ssh or srun for another host. When the input ends, the supervisor is gone: the ranks get SIGTERM, and SIGKILL if
they are still there after a while.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from harness.resilience.processes import become_subreaper, end_with_parent, reap, sweep
from harness.topology.env import inherited
from harness.topology.processes import status_of

MARK = "\x1e"  # how a line begins that an agent writes itself; others are what ranks have printed
BEAT_S = 1.0  # between two signs of life
SILENT_S = 60.0  # a supervisor on another host that says nothing for so long is gone
GRACE_S = 60.0  # ranks without a supervisor have so long to save
PAUSED_S = 5.0  # between two looks: the agent was stopped itself, as a whole job may be
NOT_FOUND = 127  # exit code of a command that cannot be started


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an agent starts.

    Attributes:
        records: folder for the records of this attempt; `root` is that of all attempts of the run.
        folder: in which the ranks run.
        ranks: number, command and further environment of each rank on this host.
        out: file descriptor that the ranks print to; None: the agent's own standard output.
        is_remote: whether the connection may be cut without an end of the input.
        stopped_s: ranks that are all stopped for so long are ended (0: never); of a single one its peers take notice.
    """

    records: str
    root: str
    folder: str
    ranks: list[tuple[int, list[str], dict[str, str]]]
    out: int | None = None
    is_remote: bool = False
    stopped_s: float = 0.0

    def line(self) -> bytes:
        """Return the order as one line for an agent."""
        return json.dumps(asdict(self)).encode() + b"\n"


class LineReader:
    """Whole lines from a file descriptor, as they come."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self._rest = b""

    def read(self) -> list[str]:
        """Return the lines that are there now."""
        while not self.is_closed and select.select([self.descriptor], [], [], 0)[0]:
            chunk = os.read(self.descriptor, 1 << 16)
            self._rest += chunk
            self.is_closed = not chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class Agent:
    """Starts ranks, passes signals on to them, reports their ends."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.alive: dict[int, int] = {}  # rank of each process
        self.received: list[int] = []  # signals to this process
        self._started: list[subprocess.Popen[bytes]] = []
        self._heard, self._beat = time.monotonic(), 0.0
        self._went_on = time.monotonic()  # when a rank was seen last that is not stopped
        self._input = LineReader(0)

    def run(self) -> None:
        """Do what the supervisor says until it ends the attempt, or is gone."""
        self.report()
        while not (self._input.is_closed or self._is_forgotten()):
            select.select([0], [], [], 0.05)
            for line in self._input.read():
                self._heard = time.monotonic()
                if line.startswith("{"):
                    self.start(Order(**json.loads(line)))
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
            shutil.rmtree(self.order.root, ignore_errors=True)  # the supervisor cannot do it any more

    def report(self, **what: object) -> None:
        """Write a line to the supervisor; without arguments a sign of life."""
        self._beat = time.monotonic()
        with suppress(OSError):
            os.write(1, f"{MARK}{json.dumps({**what, 'time': time.time()})}\n".encode())

    def start(self, order: Order) -> None:
        """Start the ranks, after what an earlier attempt may have left on this host has been ended."""
        sweep(order.root, spared=order.records)
        self.order = order
        for rank, command, environment in order.ranks:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=order.folder,
                    env={**inherited(), **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=order.out,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                print(f"error: cannot start {command[0]} in {order.folder}: {error.strerror}", file=sys.stderr)
                self.report(rank=rank, code=NOT_FOUND)
                continue
            self._started.append(process)
            self.alive[process.pid] = rank

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""
        for process in self.alive:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def look(self) -> None:
        """Report ranks that have ended; give a sign of life when it is time."""
        for process, code in reap():
            if process in self.alive:
                self.report(rank=self.alive.pop(process), code=code)
        if time.monotonic() - self._beat > BEAT_S:
            self._end_stopped()
            self.report()

    def _end_stopped(self) -> None:
        """Kill the ranks of this host if all of them have been stopped for long, as none is left to watch them."""
        limit, now = self.order.stopped_s if self.order is not None else 0.0, time.monotonic()
        if not self.alive or not all(map(_is_stopped, self.alive)) or now - self._beat > PAUSED_S:
            self._went_on = now
        elif limit and now - self._went_on > limit:
            print(f"error: all ranks here have been stopped for {limit:g} s: they are ended", file=sys.stderr)
            self.signal(signal.SIGKILL)

    def _is_forgotten(self) -> bool:
        is_remote = self.order is not None and self.order.is_remote
        return is_remote and time.monotonic() - self._heard > SILENT_S

    def _end_slowly(self) -> None:
        """Let the ranks save; a stopped one goes on first."""
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
    """Be an agent."""
    become_subreaper()
    agent = Agent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: agent.received.append(number))
    try:
        agent.run()
    finally:
        if agent.order is not None:
            sweep(agent.order.records)


if __name__ == "__main__":
    main()
