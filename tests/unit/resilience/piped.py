"""An agent as the supervisor sees it, whose process is two pipes that a test holds the other ends of."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from harness.resilience.attempt import AgentProcess
from harness.resilience.hosts import HostDevices
from harness.resilience.on_host.messages import MARK, LineReader
from harness.resilience.process.records import Failure, Position


class Ends:
    """What an agent's process is to the supervisor: two pipes and an end."""

    def __init__(self) -> None:
        (self.orders, stdin), (stdout, self.answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb", buffering=0)
        self.is_ended = False

    def wait(self, timeout: float | None = None) -> int:
        self.is_ended = True
        return 0


class PipedAgent(AgentProcess):
    """An agent of which a test plays the other side."""

    def __init__(self, host: HostDevices) -> None:
        self.host, self.reports, self.answered, self.out = host, [], False, None
        self._heard = time.monotonic()
        self.ends = Ends()
        self._process: subprocess.Popen[bytes] = self.ends  # type: ignore[assignment]
        self.lines = LineReader(self.ends.stdout.fileno())

    def say(self, **what: object) -> None:
        """Write a report, as the agent does."""
        os.write(self.ends.answers, f"{MARK}{json.dumps({**what, 'time': 1.0})}\n".encode())

    def told(self) -> list[str]:
        """The lines that the supervisor has sent."""
        return LineReader(self.ends.orders).read()

    def hang_up(self) -> None:
        """End as a dead agent does."""
        os.close(self.ends.answers)


def host(name: str = "localhost", count: int = 2) -> HostDevices:
    return HostDevices(name=name, devices=tuple(range(count)))


def failure(rank: int, **more: object) -> Failure:
    stated: dict[str, object] = {
        "host": "a",
        "pid": 1,
        "stage": None,
        "step": 5,
        "doing": "training",
        "time": float(rank),
    }
    flags = {"error": "ValueError", "message": "wrong", "is_user_error": False, "is_lost_peer": False}
    return Failure(**{**stated, **flags, "rank": rank, **more})  # type: ignore[arg-type]


def write_failure(folder: Path, rank: int, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(failure(rank, **more))))


def write_position(folder: Path, rank: int, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    position = Position(rank=rank, host="a", stage=0, step=step, doing="training")
    (folder / f"position-{rank}.json").write_text(json.dumps(asdict(position)))
