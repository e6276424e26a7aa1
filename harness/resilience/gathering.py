"""Before each attempt: find the hosts that answer, choose the layout, and tell each host's agent what to start.

`ReadyAgents` keeps agents for the next attempt, each with a process that has done the imports of a rank: imports take
most of the time of a restart, and on many hosts all ranks would read the same files at once.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from harness.errors import UserError
from harness.resilience.attempt import AgentProcess, listen
from harness.resilience.hosts import HostDevices, meeting_address
from harness.resilience.on_host.messages import Order, Preparation
from harness.resilience.options import Options
from harness.resilience.process.records import read_positions
from harness.resilience.script import Script, Start
from harness.topology.env import PORTS, RECORDS
from harness.topology.placement import Host, place

HELLO_S = 20.0  # a host that does not answer within this time is left out
HOSTS_S = 1800.0  # longest wait for missing hosts
HOST_RETRY_S = 30.0  # interval of attempts to reach missing hosts
IS_LINUX = sys.platform == "linux"  # elsewhere there are no subreapers, which standby processes need
Device: TypeAlias = tuple[str, int]
"""Name of the host, and number of the device there."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """The agents of an attempt, each with the devices in use, and what they start."""

    agents: list[AgentProcess]
    start: Start

    def device(self, rank: int) -> Device:
        """Return host and device of a rank."""
        return [(agent.host.name, device) for agent in self.agents for device in agent.host.devices][rank]


class Gathering:
    """Finds the hosts of each attempt.

    Attributes:
        hosts: all hosts that the user gave.
        failing: devices that are left out.
        missing: hosts that did not answer the last time.
        ready: agents for the next attempt.
    """

    def __init__(self, options: Options, hosts: Sequence[HostDevices], script: Script) -> None:
        self.options, self.hosts, self.script = options, tuple(hosts), script
        self.failing: set[Device] = set()
        self.missing: list[HostDevices] = []
        is_wanted = bool(options.max_restarts) and not options.no_standby and script.is_known and IS_LINUX
        self.ready = ReadyAgents(options.ssh_port, is_wanted=is_wanted)
        self._looking: list[AgentProcess] = []
        self._looked = 0.0

    def team(self, attempt: int, say: Callable[[str], None], received: Sequence[int]) -> Team | None:
        """Return the agents of the hosts that answer, with the best layout for them; None if a signal ends the wait.

        Raises:
            UserError: too few hosts answer, and waiting is off or has taken HOSTS_S.
        """
        until, wanted = time.monotonic() + HOSTS_S, sum(len(host.devices) for host in self.hosts)
        while not received:
            usable = self._usable()
            agents = self._connect(usable)
            answering = {agent.host.name for agent in agents}
            self.missing = [host for host in usable if host.name not in answering]
            ranks = sum(len(agent.host.devices) for agent in agents)
            start = self.script.first(ranks) if ranks == wanted else self.script.on_fewer(wanted, ranks)
            missing = ", ".join(host.name for host in self.missing)
            fewest = wanted if not self.options.max_restarts else self.options.min_ranks or 1
            if start is not None and start.ranks >= fewest:
                if missing:
                    say(f"no answer from {missing}: going on without")
                return Team(agents=_used(agents, start), start=self.script.again(start) if attempt else start)
            for agent in agents:
                agent.end()
            problem = f"no answer from {missing}" if missing else f"{ranks} of {wanted} devices are left"
            if not (missing and self.options.max_restarts) or time.monotonic() > until:
                raise UserError(f"{problem}, and no layout of at least {fewest} ranks fits what is left")
            say(f"{problem}: waiting for at least {fewest} ranks")
            wait(HOST_RETRY_S, received)
        return None

    def returned(self) -> bool:
        """Whether a missing host answers now. Tries every HOST_RETRY_S, and never blocks."""
        if self.missing and not self._looking and time.monotonic() - self._looked > HOST_RETRY_S:
            self._looking = [AgentProcess(host, self.options.ssh_port) for host in self.missing]
            self._looked = time.monotonic()
        for agent in self._looking:
            agent.read()
        found = any(agent.answered for agent in self._looking)
        if found or all(agent.is_lost() for agent in self._looking):
            self.stop_looking()
        return found

    def stop_looking(self) -> None:
        """End the agents that try to reach missing hosts."""
        while self._looking:
            self._looking.pop().end()

    def order(self, team: Team, records: Path, root: Path) -> None:
        """Tell each agent which ranks to start, with their environment."""
        hosts = [agent.host for agent in team.agents]
        common = {
            "MASTER_ADDR": meeting_address(self.options, hosts[0], len(hosts)),
            "MASTER_PORT": str(self.options.master_port or _free_port()),
            "WORLD_SIZE": str(team.start.ranks),
            "CROSS_SIZE": str(len(hosts)),
            RECORDS: str(records),
        }
        rank = 0
        for index, agent in enumerate(team.agents):
            size = str(len(agent.host.devices))
            place = {"LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size, "CROSS_RANK": str(index)}
            ranks = []
            for local in range(len(agent.host.devices)):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(local)}
                ranks.append((rank, self._command(team.start, local), {**common, **place, **numbers}))
                rank += 1
            agent.order(
                Order(
                    records=str(records),
                    root=str(root),
                    folder=str(Path.cwd()),
                    environment=agent.host.environment(),
                    ranks=ranks,
                    out=agent.out,
                    is_remote=agent.out is None,
                    stopped_s=self.script.hang_seconds,
                )
            )

    def _connect(self, hosts: Sequence[HostDevices]) -> list[AgentProcess]:
        """Start an agent on each host without a ready one; return the agents that answer."""
        ready = self.ready.take()
        agents = []
        for host in hosts:
            agent = ready.pop(host.name, None) or AgentProcess(host, self.options.ssh_port)
            agent.host = host
            agents.append(agent)
        until = time.monotonic() + HELLO_S
        while time.monotonic() < until and not all(agent.answered or agent.lines.is_closed for agent in agents):
            listen(agents)
        for agent in [*ready.values(), *(agent for agent in agents if not agent.answered)]:
            agent.end()
        return [agent for agent in agents if agent.answered]

    def _command(self, start: Start, local_rank: int) -> list[str]:
        options = self.options
        python = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
        script, *arguments = start.words
        local = [] if options.no_local_rank else [f"--local_rank={local_rank}"]
        return [*python, script, *local, *arguments]

    def _usable(self) -> list[HostDevices]:
        kept = []
        for host in self.hosts:
            devices = tuple(device for device in host.devices if (host.name, device) not in self.failing)
            kept.append(replace(host, devices=devices))
        return [host for host in kept if host.devices]


def _used(agents: list[AgentProcess], start: Start) -> list[AgentProcess]:
    """Reduce the agents' devices to those of the layout, keeping tensor-parallel groups inside hosts if possible."""
    hosts = [Host(name=agent.host.name, slots=len(agent.host.devices)) for agent in agents]
    placed = place(start.layout, hosts) if start.layout else None
    slots = {host.name: host.slots for host in placed} if placed else None
    left, used = start.ranks, []
    for agent in agents:
        count = min(left, len(agent.host.devices) if slots is None else slots.get(agent.host.name, 0))
        agent.host = replace(agent.host, devices=agent.host.devices[:count])
        left -= count
        if count:
            used.append(agent)
        else:
            agent.end()
    return used


def _free_port() -> int:
    """Return a free port below the ephemeral range, from which the system could give it to another process."""
    for port in random.sample(PORTS, 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise UserError("no port is free: give --master_port")


def wait(seconds: float, received: Sequence[int]) -> None:
    """Sleep for `seconds`, or until a signal comes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not received:
        time.sleep(0.1)


PRELOADED = (
    "torch.distributed",
    "transformers.generation",  # this and the next two: imported by every model
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "deepspeed.runtime.zero.muon.original_muon",  # imports torch's compiler, as the first engine would
    "deepspeed.module_inject.auto_ep_layer",  # this and the next two: imported by the first engine
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch._subclasses.schema_check_mode",
    "harness.training.trainer",
)
POSITIONS_S = 1.0  # interval of looks at the steps of the ranks
STEP = 2  # prepare the next attempt from this step on: start-up is over, and processors are free


class ReadyAgents:
    """The agents for the next attempt; none unless `is_wanted`."""

    def __init__(self, ssh_port: int | None, *, is_wanted: bool) -> None:
        self._ssh_port, self.is_wanted = ssh_port, is_wanted
        self._agents: list[AgentProcess] = []
        self._looked = 0.0

    @property
    def processes(self) -> list[int]:
        """Processes that survive the end of an attempt."""
        return [agent.process for agent in self._agents]

    def look(self, hosts: Sequence[HostDevices], records: Path, following: Path) -> None:
        """Start the agents once the ranks train, and read their output. Never blocks.

        Args:
            hosts: hosts in use.
            records: folder of the running attempt.
            following: folder of the attempt to prepare for.
        """
        for agent in self._agents:
            agent.read()
        if self._agents or not self.is_wanted or time.monotonic() - self._looked < POSITIONS_S:
            return
        self._looked = time.monotonic()
        if any(position.step >= STEP for position in read_positions(records).values()):
            for host in hosts:
                agent = AgentProcess(host, self._ssh_port)
                self._agents.append(agent)
                wanted = Preparation(
                    records=str(following),
                    folder=str(Path.cwd()),
                    environment=host.environment(),
                    out=agent.out,
                    modules=PRELOADED,
                )
                agent.send(wanted.line())

    def take(self) -> dict[str, AgentProcess]:
        """Return the living agents by host, and hand them over to the caller."""
        agents, self._agents = self._agents, []
        for agent in agents:
            agent.read()
        found = {agent.host.name: agent for agent in agents if agent.answered and not agent.is_lost()}
        for agent in agents:
            if agent not in found.values():
                agent.end()
        return found

    def end(self) -> None:
        """End them all."""
        for agent in self.take().values():
            agent.end()
