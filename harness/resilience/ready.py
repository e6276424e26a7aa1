"""Agents that are kept for the next attempt, each with a process that has imported what ranks need.

Of a restart on two cores, imports take most of the time; on many hosts, all ranks would read the same files at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.resilience.attempt import AgentProcess
from harness.resilience.hosts import HostDevices
from harness.resilience.on_host.messages import Preparation
from harness.resilience.process.records import read_positions

PRELOADED = (
    "torch.distributed",
    "transformers.generation",  # with the next two what the models of all families import
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "deepspeed.runtime.zero.muon.original_muon",  # with it torch's compiler, which the first engine would import
    "deepspeed.module_inject.auto_ep_layer",  # this and the next two: what the first engines would import
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch._subclasses.schema_check_mode",
    "harness.training.trainer",
)
LOOK_S = 1.0
STEP = 2  # when ranks make this step they have started up, and have processors to spare


class ReadyAgents:
    """The agents for the next attempt; none unless `is_wanted`."""

    def __init__(self, ssh_port: int | None, *, is_wanted: bool) -> None:
        self._ssh_port, self.is_wanted = ssh_port, is_wanted
        self._agents: list[AgentProcess] = []
        self._looked = 0.0

    @property
    def processes(self) -> list[int]:
        """What is not to be ended with the attempt."""
        return [agent.process for agent in self._agents]

    def look(self, hosts: Sequence[HostDevices], records: Path, following: Path) -> None:
        """Start the agents once the ranks train; hear what they say. It does not wait.

        Args:
            hosts: in use now.
            records: folder of the attempt that runs.
            following: that of the attempt to prepare for.
        """
        for agent in self._agents:
            agent.read()
        if self._agents or not self.is_wanted or time.monotonic() - self._looked < LOOK_S:
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
        """Return the agents that are there, by host; they are the caller's now."""
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
