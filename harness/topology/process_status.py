"""The state of a process, read from /proc: whether it runs, is stopped, or how it has ended."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessStatus:
    """The state of a process.

    Attributes:
        state: Linux's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
        started: start time in clock ticks; distinguishes it from a later process with the same id.
        ending: how a process has ended; "" if that is unknown.
    """

    state: str
    started: int
    ending: str = ""


def status_of(process: int) -> ProcessStatus | None:
    """Return the state of a process; None if it is gone. OSError if it cannot be read."""
    try:
        # The command's name, in brackets, may itself contain brackets and spaces: split behind the last bracket.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state = fields[0]
    started = int(fields[19])
    code = int(fields[49])
    if state not in "ZX":
        return ProcessStatus(state, started)
    name = signal.Signals(code & 127).name if code & 127 else ""
    return ProcessStatus(state, started, f"ended by {name}" if name else f"ended with exit code {code >> 8}")


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped (as by SIGSTOP); False where that cannot be known."""
    with suppress(OSError):
        status = status_of(process)
        return status is not None and status.state == "T"
    return False
