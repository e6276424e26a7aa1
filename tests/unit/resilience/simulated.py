"""Agents of several hosts in threads of one process, whose ranks are played by the test: the real store, rendezvous,
leader and verdicts, without processes."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from harness.errors import UserError
from harness.resilience.elastic import Agent
from harness.resilience.hosts import listen
from harness.resilience.on_host.ranks import Exit
from harness.resilience.options import read_options
from harness.resilience.process.records import EXPECTED, SUCCESS, Failure, Position
from harness.resilience.rendezvous import connect, run_store, serve
from harness.resilience.script import Script
from harness.resilience.team import LOST, Offer

KNOWN = ("scripts/train.py", "--deepspeed_config", "tensor_parallel", "--max_steps", "9")


class PlayedRanks:
    """The ranks of a host, as an agent sees them."""

    def __init__(self, root: Path, play: Callable[[PlayedRanks], None]) -> None:
        self.root, self.play = root, play
        self.records, self.count, self.number = root, 0, -1
        self.exits: list[Exit] = []
        self.signals: list[int] = []
        self.commands: list[tuple[int, list[str], dict[str, str]]] = []
        self.is_ended = True

    def start(self, number: int, ranks: Sequence[tuple[int, list[str], dict[str, str]]]) -> None:
        self.number, self.commands, self.count = number, list(ranks), len(ranks)
        self.exits, self.signals, self.is_ended = [], [], False
        self.records = self.root / f"{number:04d}"
        self.records.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        if not self.is_ended and self.count:
            self.play(self)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def end(self) -> None:
        self.is_ended = True

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, _, _ in self.commands]

    def exit(self, rank: int, code: int) -> None:
        if rank in self.ranks and rank not in {each for each, _, _ in self.exits}:
            self.exits.append(Exit(rank, code, time.time()))

    def step(self, step: int) -> None:
        for rank in self.ranks:
            write_position(self.records, rank, step)

    def fail(self, rank: int, **more: object) -> None:
        if rank in self.ranks:
            write_failure(self.records, rank, **more)

    def succeed(self) -> None:
        if 0 in self.ranks:
            (self.records / EXPECTED).write_text("{}")
            (self.records / SUCCESS).write_text("{}")
        for rank in self.ranks:
            self.exit(rank, 0)


def failure(rank: int, **more: object) -> Failure:
    stated: dict[str, object] = {"host": "a", "pid": 1, "stage": None, "step": 5, "doing": "training"}
    flags = {"error": "ValueError", "message": "wrong", "is_user_error": False, "is_lost_peer": False}
    return Failure(**{"time": time.time(), **stated, **flags, "rank": rank, **more})  # type: ignore[arg-type]


def write_failure(folder: Path, rank: int, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(failure(rank, **more))))


def write_position(folder: Path, rank: int, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    position = Position(rank=rank, host="a", stage=0, step=step, doing="training")
    (folder / f"position-{rank}.json").write_text(json.dumps(asdict(position)))


class Host:
    """A host whose launch runs in a thread.

    Attributes:
        code: of the launch, when it has ended, and the error that it shows the user.
        is_cut: whether it is off the network, and stands still.
    """

    def __init__(self, run: SimulatedRun, index: int, play: Callable[[PlayedRanks], None]) -> None:
        self.run, self.index = run, index
        self.ranks = PlayedRanks(run.folder / f"{index}-{time.monotonic_ns()}", play)
        self.received: list[int] = []
        self.code: int | None = None
        self.error = ""
        self.is_killed = False
        self.first_agent = 10 * len(run.hosts)  # a launch that is started again is another agent
        self.agent: Agent | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _look(self) -> None:
        if self.is_killed:
            if self.agent is not None:
                self.agent.heartbeat.close()
            raise SystemExit(-9)
        self.ranks.look()

    def _run(self) -> None:
        run, options = self.run, self.run.options
        devices = tuple(range(run.slots))
        offer = Offer(host=f"host-{self.index}", devices=devices, address=f"10.0.0.{self.index}", position=self.index)
        history = None
        for incarnation in range(self.first_agent, self.first_agent + 9):
            try:
                store = run_store(connect(run.endpoint, self._look, options.command), options.rdzv_id)
                name = (offer.address, self.index, incarnation)
                script = Script(options.script)
                self.agent = Agent(offer, name, options, script, self.ranks, store, self._look, self.received, history)  # type: ignore[arg-type]
                try:
                    self.agent.run()
                finally:
                    self.agent.heartbeat.close()
            except (RuntimeError, RendezvousError):
                history = None if self.agent is None else self.agent.leader.known  # the store is gone
            except UserError as error:
                self.code, self.error = 1, str(error)
                return
            except SystemExit as end:
                self.code = int(end.code or 0)
                if self.code != LOST:
                    return


class SimulatedRun:
    """Some hosts and the store in which they meet."""

    def __init__(self, folder: Path, flags: str, slots: int = 1, script: Sequence[str] = KNOWN) -> None:
        self.folder, self.slots = folder, slots
        listener = listen("127.0.0.1", 0)
        assert listener is not None
        self.endpoint: tuple[str, int] = listener.getsockname()[:2]
        self.store: dist.Store = serve(listener)
        meeting = ["--rdzv_endpoint", f"{self.endpoint[0]}:{self.endpoint[1]}"]
        self.options = read_options([*flags.split(), *meeting, *script])
        self.hosts: list[Host] = []

    def lose_store(self) -> None:
        """End the process that serves the store, and start another in its place, which knows nothing."""
        del self.store
        gc.collect()
        listener = None
        while listener is None:
            time.sleep(0.05)
            listener = listen(*self.endpoint)
        self.store = serve(listener)

    def add(self, play: Callable[[PlayedRanks], None], index: int | None = None) -> Host:
        host = Host(self, len(self.hosts) if index is None else index, play)
        self.hosts.append(host)
        host.thread.start()
        return host

    def codes(self, seconds: float = 20) -> list[int | None]:
        """The exit codes of all launches, when they have ended."""
        until = time.monotonic() + seconds
        for host in self.hosts:
            host.thread.join(max(until - time.monotonic(), 0))
        return [host.code for host in self.hosts]
