"""The supervisor with ranks of a few lines: real processes, without what makes a real rank slow to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.topology.processes import parent_of
from tests.e2e.launching import environment

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from harness.errors import UserError
from harness.resilience.process import records
from harness.topology.processes import children_of, command_of

rank, attempt = int(os.environ["RANK"]), int(Path(os.environ["DS_HARNESS_RECORDS"]).name)
folder = Path(__file__).parent
records.THIS_RANK.rank, records.THIS_RANK.stage = rank, rank
records.expect_success()
for step in range(1, 4):
    records.THIS_RANK.step = step
    records.record_step()
    (folder / f"{attempt}-{rank}-{step}").write_text(str(os.getpid()))
    {what}
    time.sleep(0.2)
if rank == 0:
    records.record_success()
"""


KILLED = """
    if attempt == 0 and step == 2:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"setsid sleep 99 & echo $! >{folder}/left"]).wait()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)"""
EARLY = """
    if attempt == 0 and step == 2:
        for process in children_of(os.getppid()):
            if "harness.resilience.on_host.keeper" in command_of(process):
                os.kill(process, signal.SIGSTOP)
                (folder / "keeper").write_text(str(process))
        sys.exit(0)"""
UNHEARD = """
    if attempt == 0 and step == 2:
        while not (folder / "closed").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 1:
        print("step", flush=True)"""
STAYS = "time.sleep(600)"
RUNS: dict[str, tuple[str, tuple[object, ...]]] = {
    "killed": (KILLED, ("--max_restarts", 2)),
    "early": (EARLY, ("--max_restarts", 1)),
    "left": (f"if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n    {STAYS}", ()),
    "replaced": ("time.sleep(600 * (attempt == 0))", ("--max_restarts", 2, "--hostfile", "this-one-twice")),
    "signalled": (STAYS, ("--max_restarts", 2)),
}
"""What the ranks of a run do, and flags of the launch."""
RARE: dict[str, tuple[str, tuple[object, ...]]] = {
    "absent": ("(folder / 'words').write_text(' '.join(sys.argv))", ("--max_restarts", 2, "--hostfile", "hostfile")),
    "waiting": ("", ("--max_restarts", 2, "--hostfile", "hostfile", "--min_ranks", 2)),
    "alone": ("", ("--hostfile", "hostfile")),
    "unheard": (UNHEARD, ("--max_restarts", 2)),
}
"""The same of the thorough tests."""


def begin(folder: Path, what: str, *flags: object) -> subprocess.Popen[str]:
    """Start a run in a folder."""
    (folder / "rank.py").write_text(RANK.replace("{what}", what))
    devices = [] if "--hostfile" in flags else ["--num_accelerators", 2]
    launcher = [sys.executable, "-m", "harness.cli", "launch", *devices, *flags]
    command = [*launcher, folder / "rank.py", "--max_steps", 3, "--output_dir", folder / "run"]
    (folder / "hostfile").write_text("localhost slots=1\nno-such-host.invalid slots=1\n")
    (folder / "this-one-twice").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


Runs = dict[str, tuple[Path, subprocess.Popen[str]]]


@contextmanager
def all_at_once(runs: dict[str, tuple[str, tuple[object, ...]]], factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Start runs together: most of their time is waiting."""
    made = {name: factory.mktemp(name) for name in runs}
    begun = {name: (folder, begin(folder, runs[name][0], *runs[name][1])) for name, folder in made.items()}
    yield begun
    for _, process in begun.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with all_at_once(RUNS, tmp_path_factory) as begun:
        yield begun


@pytest.fixture(scope="module")
def rare_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with all_at_once(RARE, tmp_path_factory) as begun:
        yield begun


def said(process: subprocess.Popen[str], code: int) -> str:
    _, text = process.communicate(timeout=60)
    assert process.returncode == code, text
    return text


def pid(path: Path) -> int:
    """The process that wrote its number into a file, when it has."""
    until = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, path
        time.sleep(0.02)
    return int(path.read_text())


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(is_true: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_killed_rank_is_started_again_and_what_it_left_is_ended(runs: Runs) -> None:
    """Its peer is stopped, and it leaves a child in a session of its own, without a parent."""
    folder, process = runs["killed"]
    text = said(process, 0)
    assert "rank 0" in text and "stage 0) was killed by SIGKILL in step 2" in text and "restart 1 of 2" in text
    assert "done, after 1 restart" in text
    assert is_gone(pid(folder / "left")) and is_gone(pid(folder / "0-1-2"))
    assert (folder / "1-1-3").exists()


@pytest.mark.thorough
def test_a_run_goes_on_when_nobody_reads_what_it_prints(rare_runs: Runs) -> None:
    """The launch says why it starts again, and the ranks of the next attempt print: both to a pipe without a reader."""
    folder, process = rare_runs["unheard"]
    pid(folder / "0-0-2")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    (folder / "closed").touch()
    assert process.wait(60) == 0
    assert (folder / "1-0-3").exists() and (folder / "1-1-3").exists()


def test_only_the_marker_is_success(runs: Runs) -> None:
    """The keeper is stopped meanwhile; the launch ends nevertheless."""
    folder, process = runs["early"]
    text = said(process, 0)
    assert is_gone(pid(folder / "keeper"))
    assert "ended with exit code 0 without a recorded error, before the run was complete, in step 2" in text
    assert "restart 1 of 1" in text


def test_the_ranks_end_with_their_supervisor(runs: Runs) -> None:
    """Though a rank is stopped, and their supervisor was as well."""
    folder, process = runs["left"]
    ranks = [pid(folder / f"0-{rank}-1") for rank in range(2)]
    process.send_signal(signal.SIGSTOP)
    process.kill()
    wait_until(lambda: all(map(is_gone, ranks)))


@pytest.mark.thorough
def test_the_launch_of_a_host_that_is_killed_is_replaced(runs: Runs) -> None:
    """Two hosts of a hostfile, which are this one: the launch of one, which has started its rank, is killed."""
    folder, process = runs["replaced"]
    rank = pid(folder / "0-1-1")
    os.kill(parent_of(rank), signal.SIGKILL)
    wait_until(lambda: is_gone(rank))
    assert "no answer from the agent on 127.0.0.1, in step 1" in said(process, 0)


def test_a_signal_ends_the_run_whatever_the_ranks_do(runs: Runs) -> None:
    folder, process = runs["signalled"]
    ranks = [pid(folder / f"0-{rank}-1") for rank in range(2)]
    process.send_signal(signal.SIGTERM)
    said(process, 128 + signal.SIGTERM)
    assert all(map(is_gone, ranks))


@pytest.mark.thorough
def test_a_host_that_does_not_answer_is_left_out_or_waited_for(rare_runs: Runs) -> None:
    folder, process = rare_runs["absent"]
    text = said(process, 0)
    assert "no answer from no-such-host.invalid: going on without" in text
    assert "--global_batch_size 16" in (folder / "words").read_text()  # 8 on each of two ranks
    assert not (folder / "0-1-1").exists()
    waiting = rare_runs["waiting"][1]
    assert waiting.stderr is not None
    assert any("waiting for at least 2 ranks" in line for line in waiting.stderr)
    waiting.send_signal(signal.SIGTERM)
    said(waiting, 128 + signal.SIGTERM)
    assert "no answer from no-such-host.invalid" in said(rare_runs["alone"][1], 1)
