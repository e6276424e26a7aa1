"""Find and kill all processes of a run on this host, stopped and re-parented ones too.

The engine ends the processes that it has started itself, not what these have left: data workers, compilers, servers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from harness.topology.env import RECORDS

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
SWEEP_S = 30.0  # a process that waits for a disk that does not answer cannot be killed


def become_subreaper() -> None:
    """Make this process the new parent of orphans among its descendants, so that it can find and reap them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_dies(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux: ranks look for their parent themselves
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def sweep(records: str, kept: Collection[int] = ()) -> list[int]:
    """Kill all processes of a run but this one, and wait until they are gone.

    Args:
        records: prefix of the records folders of the attempts to kill, as in DS_HARNESS_RECORDS.
        kept: processes to leave alone, with their descendants.

    Returns:
        The processes that could not be killed within SWEEP_S.
    """
    until = time.monotonic() + SWEEP_S
    while found := members(records, kept):
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        reap()
        if time.monotonic() > until:
            return found
        time.sleep(0.01)
    reap()
    return []


def reap() -> list[tuple[int, int]]:
    """Reap exited children; return (process, exit code) of each, with a negative code for a signal."""
    ended = []
    with suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((result[0], os.waitstatus_to_exitcode(result[1])))
    return ended


def members(records: str, kept: Collection[int] = ()) -> list[int]:
    """Return the processes of a run but this one: those with its records in their environment, and all descendants."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    marker = f"\0{RECORDS}={records}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(folder.name)] = int(parent)
            environment = b"\0" + (folder / "environ").read_bytes()
            if marker in environment:
                marked.add(int(folder.name))
    marked |= {process for process in parents if _descends(process, [os.getpid()], parents)}
    left_alone = {process for process in marked if process in kept or _descends(process, kept, parents)}
    return sorted(marked - left_alone - {os.getpid()})


def _descends(process: int, ancestors: Collection[int], parents: dict[int, int]) -> bool:
    seen = 0
    while process in parents and seen < len(parents):
        process, seen = parents[process], seen + 1
        if process in ancestors:
            return True
    return False
