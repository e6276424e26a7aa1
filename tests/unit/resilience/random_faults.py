"""Runs of three simulated hosts with faults drawn at random: python -m tests.unit.resilience.random_faults SEED COUNT.

Launches are killed, stopped for a while and started again, ranks die, at any moment of a start, a meeting or a restart.
When the faults end, all hosts must soon train together, and all launches end with 0. Waits are shortened twentyfold.
Not collected by pytest: a run takes some 8 seconds, and most seeds find nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from harness.resilience import elastic, leading, rendezvous
from harness.resilience.rendezvous import Heartbeat
from harness.resilience.team import LOST
from tests.unit.resilience.simulated import Host, PlayedRanks, SimulatedRun
from tests.unit.resilience.test_elastic import KNOWN_ZERO

HOSTS = 3
FLAGS = f"--nnodes 1:{HOSTS} --nproc_per_node 1 --max_restarts 999"
BATCH = ("--global_batch_size", "12", "--per_device_train_batch_size", "1")  # for one rank, two and three
KINDS = ("kill", "start", "stop", "stop", "continue", "continue", "rank", "rank")
TOGETHER_S, END_S = 25.0, 15.0


class FaultyHost(Host):
    """A host whose launch can be stopped, as by SIGSTOP: its agent and its heartbeat stand still."""

    is_stopped = False

    def _look(self) -> None:
        while self.is_stopped and not self.is_killed:
            time.sleep(0.02)
        super()._look()

    @property
    def is_there(self) -> bool:
        return not self.is_killed and self.code in (None, LOST)

    def stop(self, *, on: bool) -> None:
        self.is_stopped = on
        if self.agent is not None:
            self.agent.heartbeat.is_stopped = on  # type: ignore[attr-defined]


class FaultyRun(SimulatedRun):
    """A run and its faults."""

    def __init__(self, seed: int) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="random-faults-")), FLAGS, script=(*KNOWN_ZERO, *BATCH))
        self.draw, self.done, self.step = random.Random(seed), threading.Event(), 0
        self.dead_ranks: set[tuple[int, int]] = set()
        self.events: list[str] = []
        self.begun = time.monotonic()
        for index in range(HOSTS):
            self.start(index)

    def start(self, index: int) -> None:
        """Start the launch of a host."""
        host = FaultyHost(self, index, self.play)
        host.first_agent = 10 * len(self.hosts)
        self.hosts.append(host)
        host.thread.start()

    def there(self) -> list[FaultyHost]:
        """The hosts whose launches run."""
        return [host for host in self.hosts if isinstance(host, FaultyHost) and host.is_there]

    def missing(self) -> list[int]:
        return sorted(set(range(HOSTS)) - {host.index for host in self.there()})

    def play(self, ranks: PlayedRanks) -> None:
        """Make steps; save and stop on a signal; fail when a peer is lost; succeed when all is done."""
        self.step += 1
        ranks.step(self.step)
        peers = [host for host in self.hosts if host.ranks.number == ranks.number]
        for rank in ranks.ranks:
            if ranks.signals:
                ranks.fail(rank, error="Stopped", message=str(128 + ranks.signals[0]))
                ranks.exit(rank, 128 + ranks.signals[0])
            elif (ranks.number, rank) in self.dead_ranks:
                ranks.exit(rank, -signal.SIGKILL)
            elif any(host.is_killed for host in peers) or ranks.number in {start for start, _ in self.dead_ranks}:
                ranks.fail(rank, is_lost_peer=True, message="Connection closed by peer")
                ranks.exit(rank, 1)
        if self.done.is_set() and not ranks.exits and len(peers) == HOSTS:
            ranks.succeed()

    def fault(self) -> None:
        """Make one fault, if it is possible now."""
        kind, hosts = self.draw.choice(KINDS), self.there()
        stopped = [host for host in hosts if host.is_stopped]
        running = [host for host in hosts if not host.is_stopped]
        chosen: list[FaultyHost] = {"kill": hosts, "stop": running, "continue": stopped, "rank": hosts}.get(kind, [])
        if kind == "start" and self.missing():
            index = self.draw.choice(self.missing())
            self.start(index)
        elif not chosen or (kind in ("kill", "stop") and len(chosen) == 1):
            return
        else:
            host = self.draw.choice(chosen)
            index = host.index
            if kind == "kill":
                host.stop(on=False)
                host.is_killed = True
            elif kind == "rank":
                self.dead_ranks |= {(host.ranks.number, rank) for rank in host.ranks.ranks}
            else:
                host.stop(on=kind == "stop")
        self.events.append(f"{time.monotonic() - self.begun:.2f} {kind} {index}")

    def are_together(self) -> bool:
        """Whether all hosts train in one start."""
        hosts = self.there()
        sizes = [host.ranks.commands[0][2]["WORLD_SIZE"] for host in hosts if host.ranks.commands]
        return sizes == [str(HOSTS)] * HOSTS and len({host.ranks.number for host in hosts}) == 1


def passes(seed: int) -> bool:
    """Whether a run ends as it should; print what happened in it if not."""
    run = FaultyRun(seed)
    until = time.monotonic() + run.draw.uniform(4, 9)
    while time.monotonic() < until:
        time.sleep(run.draw.choice((0.05, 0.3, 0.8, 1.5)))
        run.fault()
    for host in run.there():
        host.stop(on=False)
    for index in run.missing():
        run.start(index)
    are_together = waited(run.are_together, TOGETHER_S)
    run.done.set()
    last = run.there()
    have_ended = waited(lambda: all(host.code == 0 for host in last), END_S)
    if not (are_together and have_ended):
        states = [(host.index, host.code, host.ranks.number, host.is_killed) for host in run.hosts]
        print(f"seed {seed}: together {are_together}, ended {have_ended}, {states}", *run.events, sep="\n  ")
    for host in run.hosts:
        host.is_killed = True
    return are_together and have_ended


def waited(holds: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    return holds()


def beat(self: Heartbeat, store: object) -> None:
    """As `Heartbeat._beat`, but it can be stopped."""
    while not self._closed.wait(rendezvous.HEARTBEAT_S):
        if not getattr(self, "is_stopped", False):
            store.add(self._node, 1)  # type: ignore[attr-defined]


def shorten_waits() -> None:
    times = {"HEARTBEAT_S": 0.1, "LOST_S": 0.8, "PAUSED_S": 0.5, "LAST_CALL_S": 0.6, "AGAIN_S": 0.3, "SIGNAL_S": 0.1}
    for module in (rendezvous, elastic, leading):
        for name, seconds in {**times, "PLAN_S": 5.0, "ANSWER_S": 0.8}.items():
            if hasattr(module, name) and (module, name) != (rendezvous, "ANSWER_S"):
                setattr(module, name, seconds)
    elastic.ENDS.update(fault=0.2, hosts=0.2, stop=2.0)
    Heartbeat._beat = beat  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    shorten_waits()
    first, count = map(int, sys.argv[1:])
    failed = [seed for seed in range(first, first + count) if not passes(seed)]
    print(f"{count - len(failed)} of {count} runs ended as they should; seeds that did not: {failed}", flush=True)
    os._exit(bool(failed))  # threads of killed hosts may still wait for their store
