"""A process beside a launch that ends what is left of the run on this host if the launch is killed.

It reads from a pipe that the launch holds open. When the pipe closes, the ranks get SIGTERM, which lets them save, and
SIGKILL if they are still there after a while. A launch that ends normally removes the folder of records first. The
engine has nothing that outlives its agent, and a stopped rank does not notice that its parent is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from harness.resilience.on_host.processes import members, sweep
from harness.topology.processes import own_python

GRACE_S = 60.0  # time for ranks to save


def keep(root: Path) -> subprocess.Popen[bytes]:
    """Start a keeper of the processes whose records lie under `root`; it ends when its stdin is closed."""
    command = own_python("-m", __name__, str(root))
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main() -> None:
    """Wait for the end of the launch, then end what it has left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # they are for the launch
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    root = sys.argv[1]
    if not Path(root).exists():
        return
    for process in members(root):
        for number in (signal.SIGCONT, signal.SIGTERM):  # a stopped process does not handle SIGTERM
            with suppress(ProcessLookupError):
                os.kill(process, number)
    until = time.monotonic() + GRACE_S
    while members(root) and time.monotonic() < until:
        time.sleep(0.1)
    sweep(root)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
