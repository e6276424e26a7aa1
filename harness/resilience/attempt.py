"""One start of all ranks: an agent on each host, what they report, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from harness.console import let_go_of_readers_that_are_gone, print_if_heard
from harness.resilience.cause import Ended
from harness.resilience.hosts import HostDevices
from harness.resilience.on_host.messages import MARK, LineReader, Order
from harness.resilience.on_host.processes import continue_without_parent
from harness.resilience.process.records import STOPPED, read_failures, succeeded
from harness.topology.processes import wait_readable

SILENT_S = 10.0  # so long after the last sign of life an agent counts as dead
TOLD_S = 2.0  # the other ranks have so long to record why they fail
DONE_S = 60.0  # the other ranks have so long to end after one that a signal has stopped, or when all work is done
PING_S = 1.0


class AgentProcess:
    """An agent as the supervisor sees it."""

    def __init__(self, host: HostDevices, ssh_port: int | None) -> None:
        let_go_of_readers_that_are_gone()  # the ranks may print there themselves
        self.host = host
        self.reports: list[dict[str, float]] = []
        self.answered = False
        self.out = os.dup(1) if host.is_here else None
        self._heard = time.monotonic()
        self._process = subprocess.Popen(
            host.agent(ssh_port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=continue_without_parent,
            pass_fds=() if self.out is None else (self.out,),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.lines = LineReader(self._process.stdout.fileno())

    @property
    def process(self) -> int:
        """The agent's process, or that of its ssh or srun."""
        return self._process.pid

    def order(self, order: Order) -> None:
        """Let the agent start ranks."""
        self.send(order.line())
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a stopped agent does not stop the supervisor

    def send(self, line: bytes) -> None:
        """Send a line; an agent that is gone, or stopped for long, does not get it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)

    def read(self) -> None:
        """Take in what the agent has written; print what its ranks have."""
        for line in self.lines.read():
            self._heard, self.answered = time.monotonic(), True
            if not line.startswith(MARK):
                print_if_heard(line, sys.stdout)
                continue
            report = json.loads(line.removeprefix(MARK))
            if "rank" in report:
                self.reports.append(report)

    def is_lost(self) -> bool:
        """Whether the agent has ended, or gives no sign of life."""
        return self.lines.is_closed or time.monotonic() - self._heard > SILENT_S

    def end(self) -> None:
        """Let the agent kill its ranks and end; kill it if it does not."""
        self.send(b"%d\n" % signal.SIGKILL)
        try:
            self._process.wait(SILENT_S if self.answered and not self.is_lost() else 0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self.out is not None:
            os.close(self.out)


class Attempt:
    """All ranks of one start.

    Args:
        agents: of the hosts in use.
        records: folder for the records of the ranks.
    """

    def __init__(self, agents: Sequence[AgentProcess], ranks: int, records: Path) -> None:
        self.agents, self.ranks, self.records = list(agents), ranks, records
        self.lost: list[HostDevices] = []
        self._first_end = 0.0  # when something first went wrong, was stopped, or all work was done

    def run(self, received: list[int], tick: Callable[[Attempt], None]) -> list[Ended]:
        """Wait for the end of all ranks, or of a moment after the first of them; return those that ended by themselves.

        Args:
            received: signals to the supervisor, which are passed on.
            tick: called again and again meanwhile.
        """
        passed, pinged = 0, 0.0
        while not self._is_over():
            listen(self.agents)
            for number in received[passed:]:
                self.signal(number)
            passed = len(received)
            if time.monotonic() - pinged > PING_S:
                pinged = time.monotonic()
                self.signal(0)
            self.lost = [agent.host for agent in self.agents if agent.is_lost()]
            tick(self)
        return self._ended()

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        for agent in self.agents:
            agent.send(b"%d\n" % number)

    def end(self) -> None:
        """Kill what is left, on all hosts."""
        for agent in self.agents:
            agent.end()

    def _ended(self) -> list[Ended]:
        return [
            Ended(rank=int(report["rank"]), host=agent.host.name, code=int(report["code"]), time=report["time"])
            for agent in self.agents
            for report in agent.reports
        ]

    def _is_over(self) -> bool:
        ended = self._ended()
        if len(ended) == self.ranks or self.lost:
            return True
        failures = read_failures(self.records)
        if not (failures or any(end.code for end in ended) or succeeded(self.records)):
            return False  # a rank that ended well may be the first of many: rank 0 may have much left to do
        self._first_end = self._first_end or time.monotonic()
        wrong = [failure for failure in failures if failure.error != STOPPED]
        is_told = len({end.rank for end in ended} | {failure.rank for failure in wrong}) == self.ranks
        if is_told and wrong and not any(failure.is_user_error for failure in wrong):
            return True
        recorded = {failure.rank for failure in failures}
        is_bad = bool(wrong) or any(end.code and end.rank not in recorded for end in ended)
        return time.monotonic() - self._first_end > (TOLD_S if is_bad else DONE_S)


def listen(agents: Sequence[AgentProcess]) -> None:
    """Read what agents write, waiting a moment for it."""
    wait_readable([agent.lines.descriptor for agent in agents if not agent.lines.is_closed], 0.1)
    for agent in agents:
        agent.read()
