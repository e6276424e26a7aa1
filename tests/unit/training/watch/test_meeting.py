"""Before the ranks have met: one that is stopped, and holds what another waits for, is found and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOLDER = """
import fcntl, pathlib, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""
WAITER = """
import fcntl, sys
from harness.training.console import plain_console
from harness.training.watch.meeting import watching_for_stopped_ranks
with watching_for_stopped_ranks(1.0, plain_console(1)):
    fcntl.flock(open(sys.argv[1], "w"), fcntl.LOCK_EX)
"""


def test_a_rank_that_is_stopped_while_it_holds_a_lock_ends_the_run(tmp_path: Path) -> None:
    lock, held, records = tmp_path / "lock", tmp_path / "held", tmp_path / "records"
    records.mkdir()
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid()), "WORLD_SIZE": "2"}
    environment = {**os.environ, **launched, "DS_HARNESS_RECORDS": str(records)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock), str(held)], env={**environment, "RANK": "0"})
    while not held.exists():
        time.sleep(0.01)
    holder.send_signal(signal.SIGSTOP)
    waiter = subprocess.run(
        [sys.executable, "-c", WAITER, str(lock)],
        env={**environment, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert waiter.returncode == 1
    assert (
        "rank 0 (host" in waiter.stderr and "is stopped (process state T), and the others wait for it" in waiter.stderr
    )
    assert holder.wait(10) == -signal.SIGKILL
    assert json.loads((records / "rank-0.json").read_text())["error"] == "Hang"
