"""The ranks of a host, with real processes: forked from one that stands by, seen to end, ended with all they leave."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.resilience.on_host import processes
from harness.resilience.on_host import ranks as module
from harness.resilience.on_host.processes import become_subreaper
from harness.resilience.on_host.ranks import Ranks
from harness.resilience.on_host.standby import TITLE, Standby
from harness.topology.env import RECORDS
from harness.topology.process_status import status_of
from harness.topology.processes import children_of, command_of

pytestmark = pytest.mark.ranks

WRITE_PID = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
REPORT = r"""
import json, os, pathlib, sys
here = pathlib.Path("/proc/self/cmdline").read_bytes().decode().strip("\0").split("\0")
rank = int(os.environ["RANK"])
found = {"argv": sys.argv, "shown": here, "folder": os.getcwd(), "name": __name__, "path": sys.path[0]}
found |= {"is_loaded": "colorsys" in sys.modules, "parent": os.getppid()}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
print("rank", rank)
sys.exit(rank * 3)
"""
Make = Callable[..., Ranks]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Ranks of this process, of which nothing is left afterwards; a process that stands by imports little."""
    made: list[Ranks] = []
    monkeypatch.setattr(Standby.__init__, "__defaults__", (("colorsys",),))
    monkeypatch.chdir(tmp_path)

    def ranks(*, preloads: bool = True, stopped_s: float = 1.0) -> Ranks:
        spared = children_of(os.getpid())
        ours = {"stopped_s": stopped_s, "preloads": preloads, "spared": spared}
        made.append(Ranks(tmp_path / "records", **ours))
        return made[-1]

    become_subreaper()
    before = children_of(os.getpid())
    yield ranks
    for each in made:
        each.close()
    assert set(children_of(os.getpid())) <= set(before)
    processes._prctl(processes.PR_SET_CHILD_SUBREAPER, 0)  # nobody would reap what later tests leave


def codes(ranks: Ranks, count: int, seconds: float = 30) -> dict[int, int]:
    """The exit codes of ranks, when there are so many."""
    until = time.monotonic() + seconds
    while len(ranks.exits) < count:
        assert time.monotonic() < until
        ranks.look()
        time.sleep(0.02)
    return {rank: code for rank, code, _ in ranks.exits}


def commands(folder: Path) -> list[tuple[int, list[str], dict[str, str]]]:
    """Two ranks that say how they find themselves."""
    (folder / "script.py").write_text(REPORT)
    words = [sys.executable, "-u", "script.py"]
    return [(rank, [*words, str(folder / f"{rank}.json")], {"RANK": str(rank)}) for rank in range(2)]


def standby() -> int:
    """The process that stands by, once it has begun to import."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for child in children_of(os.getpid()):
            if command_of(child)[:1] == (TITLE,):
                return child
        time.sleep(0.01)
    raise AssertionError("no process stands by")


def test_ranks_are_forked_from_the_process_that_stands_by_start_after_start(make: Make, tmp_path: Path) -> None:
    ranks = make()
    for number in range(2):
        ranks.start(number, commands(tmp_path))
        forker = standby()
        assert codes(ranks, 2) == {0: 0, 1: 3}
        for rank in range(2):
            command = [sys.executable, "-u", "script.py", str(tmp_path / f"{rank}.json")]
            assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
                "argv": command[2:],
                "shown": command,
                "folder": str(tmp_path),
                "name": "__main__",
                "path": str(tmp_path),
                "is_loaded": True,
                "parent": os.getpid(),
            }
            (tmp_path / f"{rank}.json").unlink()
        assert standby() == forker  # the same for the next start


def test_ranks_start_by_themselves_where_nothing_stands_by(make: Make, tmp_path: Path) -> None:
    ranks = make(preloads=False)
    ranks.start(0, commands(tmp_path))
    assert codes(ranks, 2) == {0: 0, 1: 3}
    found = json.loads((tmp_path / "1.json").read_text())
    assert not found["is_loaded"]


def test_imports_that_fail_are_left_to_the_ranks(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standby.__init__, "__defaults__", (("no_such_module",),))
    ranks = make()
    ranks.start(0, commands(tmp_path))
    assert codes(ranks, 2) == {0: 0, 1: 3}


def test_what_stands_by_and_is_killed_or_stopped_ends_its_ranks_and_is_replaced(make: Make, tmp_path: Path) -> None:
    ranks = make()
    os.kill(standby(), signal.SIGSTOP)
    ranks.start(0, commands(tmp_path))
    assert codes(ranks, 2) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    ranks.start(1, commands(tmp_path))
    assert codes(ranks, 2) == {0: 0, 1: 3}


def test_a_rank_that_is_stopped_is_ended(make: Make, tmp_path: Path) -> None:
    """Its peer goes on."""
    ranks = make(preloads=False)
    words = [sys.executable, "-c", WRITE_PID]
    ranks.start(0, [(rank, [*words, str(tmp_path / str(rank))], {}) for rank in range(2)])
    until = time.monotonic() + 30
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(int((tmp_path / "1").read_text()), signal.SIGSTOP)
    assert codes(ranks, 1) == {1: -signal.SIGSTOP}
    assert list(ranks.alive.values()) == [0]


def test_what_ranks_leave_is_ended_with_them(make: Make, tmp_path: Path) -> None:
    """A child in a session of its own, without a parent; its records folder marks it. One that ends goes at once."""
    ranks = make(preloads=False)
    left = f"(true & echo $! > {tmp_path}/ended); setsid sleep 99 & echo $! > {tmp_path}/left; sleep 99"
    ranks.start(7, [(0, ["sh", "-c", left], {})])
    until = time.monotonic() + 30
    while not (tmp_path / "left").exists() or not (tmp_path / "left").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    while status_of(int((tmp_path / "ended").read_text())) is not None:
        assert time.monotonic() < until
        ranks.look()
        time.sleep(0.02)
    process = int((tmp_path / "left").read_text())
    assert f"{RECORDS}={tmp_path}/records/0007" in Path(f"/proc/{process}/environ").read_text()
    ranks.end()
    status = status_of(process)
    assert status is None or status.state == "Z"


def test_a_command_that_cannot_be_started_is_an_exit(make: Make, tmp_path: Path) -> None:
    ranks = make(preloads=False)
    ranks.start(0, [(0, [str(tmp_path / "nothing")], {})])
    assert codes(ranks, 1) == {0: module.NOT_FOUND}
