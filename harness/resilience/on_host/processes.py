"""Find and kill all processes of a run on this host, also stopped ones and those that have lost their parent.

The engine ends only the processes that it has started itself, not theirs: data workers, compilers, servers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from harness.topology.env import RECORDS
from harness.topology.processes import wait_readable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
SWEEP_S = 30.0  # a process that waits for a disk that does not answer cannot be killed


def become_subreaper() -> None:
    """Make this process the new parent of orphans among its descendants, so that it can find and reap them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_dies(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux: ranks check their parent themselves
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def sweep(records: str, kept: Collection[int] = ()) -> list[int]:
    """Kill the other processes of a run, found as by `members`; return those that do not die within SWEEP_S seconds."""
    until = time.monotonic() + SWEEP_S
    while found := members(records, kept):
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _reap()
        if time.monotonic() > until:
            return found
        time.sleep(0.01)
    _reap()
    return []


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def members(records: str, kept: Collection[int] = ()) -> list[int]:
    """Return the other processes of a run: those with its records in their environment, and this one's descendants.

    `records` is a prefix of the folders in DS_HARNESS_RECORDS; `kept` are left out, with their descendants.
    """
    parents: dict[int, int] = {}
    marked: set[int] = set()
    marker = f"\0{RECORDS}={records}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
                if marker in b"\0" + (folder / "environ").read_bytes():
                    marked.add(int(folder.name))
    return sorted((marked | _family({os.getpid()}, parents)) - _family(set(kept), parents) - {os.getpid()})


def _family(found: set[int], parents: dict[int, int]) -> set[int]:
    """Return these processes and all their descendants."""
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found = found | more
    return found


def present_as(words: Sequence[str]) -> None:
    """Change the command line that the system shows for this process (in ps and /proc).

    It is truncated to the length of the original command line.
    """
    with suppress(OSError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin = int(fields[45])
        room = int(fields[46]) - int(fields[45])
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        ctypes.memmove(begin, text[: room - 1].ljust(room, b"\0"), room)


class LineReader:
    """Reads whole lines from a file descriptor without blocking."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self._rest = b""

    def read(self) -> list[str]:
        """Return the complete lines that have arrived."""
        while not self.is_closed and wait_readable([self.descriptor], 0):
            chunk = os.read(self.descriptor, 1 << 16)
            self._rest += chunk
            self.is_closed = not chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]
