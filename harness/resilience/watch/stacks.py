"""Where the main thread stands: whether it waits for other ranks, and the stacks of all threads as text."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/", "/harness/parallel/collectives/")
HANDLES = ("/deepspeed/", "/torch/cuda/")  # where a method of these names waits for what was begun before
WAITS = ("wait", "synchronize", "wait_stream")


@dataclass(frozen=True)
class Place:
    """Where a thread stands.

    Attributes:
        waits: whether for other ranks.
        text: the collective that it waits in, else file, line and function.
    """

    waits: bool
    text: str


def main_place() -> Place:
    """Return where the main thread stands now; another thread calls it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # its documented name
    if frame is None:
        return Place(False, "")
    if _waits(frame):
        return Place(True, frame.f_code.co_name)
    return Place(False, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")


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
