"""One start of all ranks: the agents of the hosts, what they report, and when the attempt is over."""

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

from harness.console import drop_output_without_reader, print_if_heard
from harness.resilience.cause import Ended
from harness.resilience.hosts import HostDevices
from harness.resilience.on_host.messages import MARK, LineReader, Order
from harness.resilience.on_host.processes import continue_without_parent
from harness.resilience.process.records import STOPPED, read_failures, succeeded
from harness.topology.processes import wait_readable

SILENT_S = 10.0  # an agent that sends nothing for so long counts as dead; it sends a heartbeat every second
TOLD_S = 2.0  # after a failure: time for the other ranks to record why they fail
DONE_S = 60.0  # after a stop by a signal, or success: time for the other ranks to exit
PING_S = 1.0


class AgentProcess:
    """An agent as the supervisor sees it."""

    def __init__(self, host: HostDevices, ssh_port: int | None) -> None:
        drop_output_without_reader()  # ranks on this host inherit these streams
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
        os.set_blocking(self._process.stdin.fileno(), False)  # else a stopped agent would block the supervisor

    def send(self, line: bytes) -> None:
        """Send a line. It is lost if the agent has exited, or has been stopped for so long that the pipe is full."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)

    def read(self) -> None:
        """Read the agent's reports, and print the output of its ranks."""
        for line in self.lines.read():
            self._heard, self.answered = time.monotonic(), True
            if not line.startswith(MARK):
                print_if_heard(line, sys.stdout)
                continue
            report = json.loads(line.removeprefix(MARK))
            if "rank" in report:
                self.reports.append(report)

    def is_lost(self) -> bool:
        """Whether the agent has exited, or has sent nothing for SILENT_S."""
        return self.lines.is_closed or time.monotonic() - self._heard > SILENT_S

    def end(self) -> None:
        """Tell the agent to kill its ranks and exit; kill it if it does not."""
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
        self._first_end = 0.0  # time of the first failure, stop or success

    def run(self, received: list[int], tick: Callable[[Attempt], None]) -> list[Ended]:
        """Wait until all ranks have exited, or a grace period after the first failure is over.

        Args:
            received: signals to the supervisor; new ones are sent on to the ranks.
            tick: called about ten times a second meanwhile.

        Returns:
            The ranks that exited by themselves. `end` kills the others.
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
        """Kill all ranks that are left, and the agents."""
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
            return False  # an exit code of 0 alone ends nothing: rank 0 may still be exporting the model
        self._first_end = self._first_end or time.monotonic()
        wrong = [failure for failure in failures if failure.error != STOPPED]
        is_told = len({end.rank for end in ended} | {failure.rank for failure in wrong}) == self.ranks
        if is_told and wrong and not any(failure.is_user_error for failure in wrong):
            return True
        recorded = {failure.rank for failure in failures}
        is_bad = bool(wrong) or any(end.code and end.rank not in recorded for end in ended)
        return time.monotonic() - self._first_end > (TOLD_S if is_bad else DONE_S)


def listen(agents: Sequence[AgentProcess]) -> None:
    """Wait up to 0.1 s for output of the agents, and read it."""
    wait_readable([agent.lines.descriptor for agent in agents if not agent.lines.is_closed], 0.1)
    for agent in agents:
        agent.read()
