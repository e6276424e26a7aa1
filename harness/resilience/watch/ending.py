"""Report why the watch ends a run: an error line, the stacks of all ranks, a record for `ds-harness launch`."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from harness.atomic import open_no_link
from harness.console import Console
from harness.resilience.process.records import HANG, THIS_RANK, Position, record_failure_of
from harness.resilience.watch.diagnosis import Diagnosis, RankStatus

COLLECTIVES = (
    *("/torch/distributed/", "/deepspeed/comm/", "/harness/parallel/collectives.py"),
    *("/harness/extras/host_memory.py", "/harness/extras/peers.py"),
)
HANDLES = ("/deepspeed/", "/torch/cuda/", "/torch/accelerator/")
WAITS = ("wait", "synchronize", "wait_stream")  # the functions in the folders of HANDLES that wait for other ranks
FOR_DEVICE = re.compile(r"\.(item|tolist|cpu|numpy|synchronize|to|copy_)\(|\b(bool|float|int)\(")
"""A call, in a line of Python, that waits for the accelerator."""


def announce(verdict: Diagnosis, statuses: Sequence[RankStatus], path: Path, console: Console) -> None:
    """Report a verdict: on stderr, at the top of the file of stacks, and to `ds-harness launch`.

    A dead process needs no record: the launch knows its exit code.
    """
    message = verdict.message
    if verdict.error == HANG:
        message += f"; the Python stacks of all ranks are in {path}"
        stopped = [each for each in statuses if each.state == "T"]
        lines = [verdict.message, "", *map(str, statuses)]
        lines += [f"{each.name} is stopped, so it cannot write its stack" for each in stopped]
        _append(path, "\n".join(lines) + "\n")
    console.fail(message)
    named = THIS_RANK.rank if verdict.culprit < 0 else verdict.culprit
    for each in statuses:
        if each.rank == named and verdict.error != "Dead":
            position = Position(rank=each.rank, host=each.host, stage=each.stage, step=each.step, doing=each.doing)
            record_failure_of(position, each.pid, verdict.error, message)


def append_stacks(path: Path) -> None:
    """Add the stacks of this rank's threads."""
    rank = f"rank {THIS_RANK.rank}, host {THIS_RANK.host}, step {THIS_RANK.step}, {THIS_RANK.doing}"
    _append(path, f"\n== {rank} ==\n{stacks()}")


def _append(path: Path, text: str) -> None:
    """Append in a single write, because all ranks share the file. A failed write (a full disk) is ignored."""
    with suppress(OSError):
        descriptor = open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class StackFrame(NamedTuple):
    """Where a thread is."""

    waits: bool  # whether it waits for other ranks
    text: str  # the collective that it waits in, else file, line and function


def main_frame(*, on_accelerator: bool = False) -> StackFrame:
    """Return where the main thread is now; call it from another thread.

    On an accelerator, a thread that waits for the device may be waiting for other ranks.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # its documented name
    if frame is None:
        return StackFrame(False, "")
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if any(part in file for part in COLLECTIVES) or (name in WAITS and any(part in file for part in HANDLES)):
        return StackFrame(True, name)
    text = f"{Path(file).name}:{frame.f_lineno} in {name}"
    if on_accelerator and FOR_DEVICE.search(linecache.getline(file, frame.f_lineno or 0)):
        return StackFrame(True, f"the device, {text}")
    return StackFrame(False, text)


def stacks() -> str:
    """Return the Python stacks of all threads of this process, the newest call first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
