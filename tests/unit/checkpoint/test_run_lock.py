"""One run in an output directory: another one is refused in words, and no child keeps the lock of a dead run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.checkpoint import run_lock
from harness.checkpoint.run_lock import LOCK, lock_directory, unlock_directory
from harness.errors import UserError

RUN = """
import os, sys, time
from pathlib import Path
from harness.checkpoint.run_lock import lock_directory
lock_directory(Path(sys.argv[1]))
child = os.fork()  # as a worker that reads data
if child:
    print(child, flush=True)
time.sleep(60)
"""


def start(directory: Path) -> tuple[subprocess.Popen[str], int]:
    """A run that holds the lock, and its child."""
    process = subprocess.Popen([sys.executable, "-c", RUN, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_run_is_refused_until_the_first_one_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "runs" / "one"
    process, child = start(directory)
    monkeypatch.setattr(run_lock, "WAIT_S", 0.3)
    try:
        with pytest.raises(
            UserError, match=rf"another run is using it \(process {process.pid} on {socket.gethostname()}\)"
        ):
            lock_directory(directory)
        process.kill()
        process.wait()
        os.kill(child, 0)  # still there
        lock_directory(directory)
        assert (directory / LOCK).read_text().startswith(f"process {os.getpid()} on {socket.gethostname()}\n")
    finally:
        os.kill(child, signal.SIGKILL)
        unlock_directory(directory)


def test_a_run_waits_for_a_predecessor_that_is_ending(tmp_path: Path) -> None:
    process, child = start(tmp_path)
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid} {child}"])
    begun = time.monotonic()
    lock_directory(tmp_path)
    assert time.monotonic() - begun > 0.3
    unlock_directory(tmp_path)
    process.wait()


def test_a_directory_that_was_removed_is_locked_anew(tmp_path: Path) -> None:
    directory = tmp_path / "one"
    for _ in range(2):  # the process that has the lock may ask again
        lock_directory(directory)
    shutil.rmtree(directory)
    lock_directory(directory)
    assert (directory / LOCK).exists()
    unlock_directory(directory)
    process, child = start(directory)  # the lock is free
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--output_dir {tmp_path}/file/run: cannot be written: Not a directory"):
        lock_directory(tmp_path / "file" / "run")


def test_a_lock_that_another_process_has_been_given_too_is_noticed(tmp_path: Path) -> None:
    """As where each host keeps locks of its own: NFS without its lock service, Lustre with `localflock`."""
    lock_directory(tmp_path)
    lock_directory(tmp_path)
    (tmp_path / LOCK).write_text("")  # written on a full disk
    lock_directory(tmp_path)
    name = f"process {os.getpid()} on {socket.gethostname()}"  # of two containers, both process 1 of one host's name
    (tmp_path / LOCK).write_text(f"{name}\nanother\n")
    with pytest.raises(
        UserError, match=f"another run has begun there \\({name}\\), which its file system does not prev"
    ):
        lock_directory(tmp_path)
    unlock_directory(tmp_path)


def test_a_link_in_the_place_of_the_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    """As somebody may plant it in a folder that several write to."""
    (tmp_path / "run").mkdir()
    (target := tmp_path / "theirs").write_text("precious")
    (tmp_path / "run" / LOCK).symlink_to(target)
    with pytest.raises(UserError, match=r"run: cannot be written: run\.lock is a link: remove it"):
        lock_directory(tmp_path / "run")
    assert target.read_text() == "precious"
