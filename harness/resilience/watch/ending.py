"""What the watch reports when it ends a run: an error line, the stacks of all ranks, a record for the supervisor."""

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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from harness.console import Console
from harness.resilience.process.records import HANG, THIS_RANK, Position, record_failure_of
from harness.resilience.watch.diagnosis import RankStatus, Verdict


def stacks_file(output_dir: Path, step: int) -> Path:
    """Return the file for the stacks of a hang."""
    return output_dir / f"hang-{step}.txt"


def announce(verdict: Verdict, statuses: Sequence[RankStatus], path: Path, console: Console) -> None:
    """Report a verdict: on stderr, at the top of the file of stacks, and to the supervisor.

    No record is left for a dead process: the supervisor knows its exit code.
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
    for each in statuses if verdict.error != "Dead" else []:
        if each.rank == named:
            position = Position(rank=each.rank, host=each.host, stage=each.stage, step=each.step, doing=each.doing)
            record_failure_of(position, each.pid, verdict.error, message)


def append_stacks(path: Path) -> None:
    """Add the stacks of this rank's threads."""
    _append(
        path,
        f"\n== rank {THIS_RANK.rank}, host {THIS_RANK.host}, step {THIS_RANK.step}, {THIS_RANK.doing} ==\n{stacks()}",
    )


def _append(path: Path, text: str) -> None:
    """Append in a single write, because all ranks share the file. A failed write (a full disk) is ignored."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/", "/harness/parallel/collectives/")
HANDLES = (
    "/deepspeed/",
    "/torch/cuda/",
    "/torch/accelerator/",
)  # here only methods of the names in WAITS wait for other ranks
WAITS = ("wait", "synchronize", "wait_stream")
FOR_DEVICE = re.compile(r"\.(item|tolist|cpu|numpy|synchronize|to|copy_)\(|\b(bool|float|int)\(")
"""In a line of code: a call that waits for the accelerator."""


@dataclass(frozen=True)
class StackFrame:
    """Where a thread is.

    Attributes:
        waits: whether it waits for other ranks.
        text: the collective that it waits in, else file, line and function.
    """

    waits: bool
    text: str


def main_frame(*, on_accelerator: bool = False) -> StackFrame:
    """Return where the main thread is now. Called from another thread.

    On an accelerator whoever waits for the device may wait for other ranks.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # its documented name
    if frame is None:
        return StackFrame(False, "")
    if _waits(frame):
        return StackFrame(True, frame.f_code.co_name)
    text = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    if on_accelerator and FOR_DEVICE.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)):
        return StackFrame(True, f"the device, {text}")
    return StackFrame(False, text)


def _waits(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if any(part in file for part in COLLECTIVES):
        return True
    return name in WAITS and any(part in file for part in HANDLES)


def stacks() -> str:
    """Return the Python stacks of all threads of this process, the newest call first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
