"""The agent on a host, with real processes as ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.resilience.agent import MARK, Order


def test_ranks_that_are_all_stopped_are_ended_and_reported(tmp_path: Path) -> None:
    write = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    ranks = [(rank, [sys.executable, "-c", write, str(tmp_path / str(rank))], {}) for rank in range(2)]
    folder = str(tmp_path)
    order = Order(records=folder, root=folder, folder=folder, ranks=ranks, out=2, stopped_s=1.0)
    agent = subprocess.Popen(
        [sys.executable, "-m", "harness.resilience.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(order.line())
    agent.stdin.flush()
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    for line in agent.stdout:  # a sign of life each second
        said = json.loads(line.decode().removeprefix(MARK))
        if "rank" in said:
            codes[said["rank"]] = said["code"]
        for rank in {0, 1} - stopped:
            if (path := tmp_path / str(rank)).exists() and path.read_text():
                os.kill(int(path.read_text()), signal.SIGSTOP)
                stopped.add(rank)
        if len(codes) == 2:
            break
    _, errors = agent.communicate(f"{int(signal.SIGKILL)}\n".encode(), timeout=30)
    assert codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert b"all ranks here have been stopped" in errors
