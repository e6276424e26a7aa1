"""The agent on a host, with real processes as ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.resilience.on_host.messages import MARK, Order, Preparation
from harness.resilience.on_host.standby import TITLE
from harness.topology.processes import children_of, command_of, status_of

pytestmark = pytest.mark.ranks

WRITE_PID = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
REPORT = r"""
import json, os, pathlib, sys
here = pathlib.Path("/proc/self/cmdline").read_bytes().decode().strip("\0").split("\0")
rank = int(os.environ["RANK"])
found = {"argv": sys.argv, "shown": here, "folder": os.getcwd(), "name": __name__, "path": sys.path[0]}
shown = pathlib.Path("/proc/self/environ").read_bytes().decode().strip("\0").split("\0")
found |= {"shown_environment": dict(pair.split("=", 1) for pair in shown) == dict(os.environ)}
found |= {"both": os.environ.get("BOTH"), "is_loaded": "colorsys" in sys.modules, "parent": os.getppid()}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
print("rank", rank)
sys.exit(rank * 3)
"""


class RealAgent:
    """An agent, and what it has reported."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.resilience.on_host.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def codes(self, count: int) -> Iterator[dict[int, int]]:
        """Yield the exit codes so far, once a second at least, until there are `count`."""
        codes: dict[int, int] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:  # a sign of life each second
            said = json.loads(line.decode().removeprefix(MARK))
            if "rank" in said:
                codes[said["rank"]] = said["code"]
            yield codes
            if len(codes) == count:
                return

    def standby(self) -> int:
        """Return the process that stands by, once it has imported."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            for child in children_of(self.process.pid):
                if command_of(child)[:1] == (TITLE,):
                    return child
            time.sleep(0.01)
        raise AssertionError("no process stands by")


@contextmanager
def agent() -> Iterator[RealAgent]:
    """Give an agent that has ended, with all its processes, afterwards."""
    tested = RealAgent()
    try:
        yield tested
    finally:
        left = children_of(tested.process.pid)
        if tested.process.poll() is None:
            tested.send(f"{int(signal.SIGKILL)}\n".encode())
            tested.process.communicate(timeout=30)
    assert not any(status_of(process) for process in left)


def prepared(folder: Path, **environment: str) -> Preparation:
    where = str(folder)
    return Preparation(records=where, folder=where, environment=environment, out=2, modules=("colorsys",))


def ordered(folder: Path, script: Path, **environment: str) -> Order:
    """Return the order of two ranks that say how they find themselves."""
    command = [sys.executable, "-u", script.name]
    ranks = [(rank, [*command, str(folder / f"{rank}.json")], {"RANK": str(rank)}) for rank in range(2)]
    where = str(folder)
    return Order(records=where, root=where, folder=where, environment=environment, ranks=ranks, out=2, stopped_s=1.0)


def script_in(folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(REPORT)
    return script


def test_ranks_are_forked_from_the_process_that_stands_by(tmp_path: Path) -> None:
    with agent() as tested:
        tested.send(prepared(tmp_path, BOTH="b").line())
        tested.standby()
        tested.send(ordered(tmp_path, script := script_in(tmp_path), BOTH="b").line())
        *_, codes = tested.codes(2)
        assert codes == {0: 0, 1: 3}
        for rank in range(2):
            command = [sys.executable, "-u", script.name, str(tmp_path / f"{rank}.json")]
            assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
                "argv": command[2:],
                "shown": command,
                "shown_environment": True,
                "folder": str(tmp_path),
                "name": "__main__",
                "path": str(tmp_path),
                "both": "b",
                "is_loaded": True,
                "parent": tested.process.pid,
            }


def test_ranks_start_by_themselves_where_what_stands_by_is_gone_or_not_for_them(tmp_path: Path) -> None:
    with agent() as tested:
        tested.send(prepared(tmp_path, BOTH="another").line())
        os.kill(tested.standby(), signal.SIGKILL)
        tested.send(ordered(tmp_path, script_in(tmp_path), BOTH="b").line())
        *_, codes = tested.codes(2)
    found = json.loads((tmp_path / "1.json").read_text())
    assert codes == {0: 0, 1: 3} and found["both"] == "b" and not found["is_loaded"]


def test_what_stands_by_and_is_stopped_ends_its_ranks_and_outlives_no_agent(tmp_path: Path) -> None:
    with agent() as tested:
        tested.send(prepared(tmp_path).line())
        os.kill(tested.standby(), signal.SIGSTOP)
        tested.send(ordered(tmp_path, script_in(tmp_path)).line())
        *_, codes = tested.codes(2)
        assert codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    with agent() as tested:
        tested.send(prepared(tmp_path).line())
        os.kill(standby := tested.standby(), signal.SIGSTOP)
        tested.process.kill()
        tested.process.wait()
        until = time.monotonic() + 10
        while status_of(standby) and time.monotonic() < until:
            time.sleep(0.01)
        assert status_of(standby) is None


def test_forked_ranks_end_with_their_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRITE_PID)
    with agent() as tested:
        tested.send(prepared(tmp_path).line())
        tested.standby()
        tested.send(ordered(tmp_path, script).line())
        until = time.monotonic() + 10
        while len(ranks := [path.read_text() for path in tmp_path.glob("*.json")]) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert {status_of(int(rank)) is not None for rank in ranks} == {True}
        tested.process.kill()
        tested.process.wait()
        while any(status_of(int(rank)) for rank in ranks) and time.monotonic() < until:
            time.sleep(0.01)
        assert [status_of(int(rank)) for rank in ranks] == [None, None]


def test_ranks_that_are_all_stopped_are_ended_and_reported(tmp_path: Path) -> None:
    ranks = [(rank, [sys.executable, "-c", WRITE_PID, str(tmp_path / str(rank))], {}) for rank in range(2)]
    folder = str(tmp_path)
    order = Order(records=folder, root=folder, folder=folder, environment={}, ranks=ranks, out=2, stopped_s=1.0)
    with agent() as tested:
        tested.send(order.line())
        stopped: set[int] = set()
        for found in tested.codes(2):
            codes = found
            for rank in {0, 1} - stopped:
                if (path := tmp_path / str(rank)).exists() and path.read_text():
                    os.kill(int(path.read_text()), signal.SIGSTOP)
                    stopped.add(rank)
        assert codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
