"""Read the state of processes from /proc: ancestors, memory, environment."""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

DEEPSPEED_LAUNCH = "deepspeed.launcher.launch"  # DeepSpeed's process on each host, the parent of the ranks there
# The variable for Python's flag -P, with which no module is imported from the working directory.
SAFE_PATH = "PYTHONSAFEPATH"
LEVELS = 8  # number of ancestors among which a launcher is searched; wrappers may be between


def parent_of(process: int) -> int:
    """Return a process's parent; 0 if the process is gone. Raises OSError if it cannot be read."""
    if process == os.getpid():
        return os.getppid()
    try:
        # The command's name, in brackets, may itself contain brackets and spaces: split behind the last bracket.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def children_of(process: int) -> list[int]:
    """Return the child processes of a process's main thread; [] if they cannot be read."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def command_of(process: int) -> tuple[str, ...]:
    """Return a process's command line; () if it cannot be read."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in text.split(b"\0")[:-1])


def started_with(process: int) -> dict[str, str]:
    """Return the environment that a process was started with; {} if it cannot be read."""
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def all_processes() -> list[int]:
    """Return the processes of this host that are visible to this one."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def peak_resident_bytes() -> int:
    """Return this process's peak resident memory in bytes since its start, or since the peak was last reset."""
    # Not getrusage: its `ru_maxrss` survives exec, so it may be the peak of a larger launcher or standby process that
    # started this one.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    # Not in CPython for browsers, where the planner's page imports this module.
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def own_python(*words: str) -> list[str]:
    """Return a command for this Python that imports nothing from the working directory."""
    # Others may be able to write to that directory, and their modules would run as this user.
    return [sys.executable, "-P", *words]


def above() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (process, command line) of this process's ancestors, nearest first."""
    process = os.getpid()
    for _ in range(LEVELS):
        process = parent_of(process)
        if process <= 1:
            return
        yield process, command_of(process)


def ancestor(word: str) -> int:
    """Return the nearest ancestor with `word`, or a path that ends with it, on its command line; 0 if none."""
    return next((process for process, words in above() if any(word in (w, Path(w).name) for w in words)), 0)


def wait_readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Return the file descriptors that become readable, or are closed by the other side, within `seconds`."""
    # Unlike epoll, poll needs no descriptor of its own, so it works even if the process cannot open more files.
    with selectors.PollSelector() as waiting:
        # A selector refuses a descriptor that it already has.
        for descriptor in dict.fromkeys(descriptors):
            waiting.register(descriptor, selectors.EVENT_READ)
        return [key.fd for key, _ in waiting.select(seconds)]
