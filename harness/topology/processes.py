"""The processes above this one, as far as the system shows them (in /proc)."""

from __future__ import annotations

import ctypes
import os
import resource
import selectors
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DEEPSPEED_LAUNCH = "deepspeed.launcher.launch"  # DeepSpeed's process on each host, the parent of the ranks there
LEVELS = 8  # how far up a launcher is looked for; a wrapper or two may stand between


@dataclass(frozen=True)
class ProcessStatus:
    """How a process is.

    Attributes:
        state: the system's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
        started: when it was started, in the system's clock ticks; tells it from a later one of the same number.
        ending: of one that has ended, how; empty where that is not known.
    """

    state: str
    started: int
    ending: str = ""


def status_of(process: int) -> ProcessStatus | None:
    """Return how a process is; None if it is gone. Raises OSError if that cannot be known."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started, code = fields[0], int(fields[19]), int(fields[49])
    if state not in "ZX":
        return ProcessStatus(state, started)
    name = signal.Signals(code & 127).name if code & 127 else ""
    return ProcessStatus(state, started, f"ended by {name}" if name else f"ended with exit code {code >> 8}")


def parent_of(process: int) -> int:
    """Return a process's parent; 0 if the process is gone. Raises OSError if that cannot be known."""
    if process == os.getpid():
        return os.getppid()
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def children_of(process: int) -> list[int]:
    """Return the processes that a process's main thread has started; empty if they cannot be seen."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def wakes_of(process: int) -> int:
    """How often a process has waited and gone on; 0 if that cannot be seen."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")), 0)


def command_of(process: int) -> tuple[str, ...]:
    """Return a process's command line; empty if it cannot be seen."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in text.split(b"\0")[:-1])


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held since it began, or since its peak was last reset.

    getrusage says more where a larger process has started this one, as a launcher or a standby process may be: its
    `ru_maxrss` is handed on from the process that was forked to the program that it then becomes.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def present_as(words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Let the system show another command line, and another environment, for this process.

    Each is cut to the room that the one it was started with has taken. The environment itself stays as it is: nothing
    may point to the old one any more.
    """
    with suppress(OSError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        _overwrite(int(fields[45]), int(fields[46]), words)
        if environment is not None:
            _overwrite(int(fields[47]), int(fields[48]), [f"{name}={value}" for name, value in environment.items()])


def _overwrite(begin: int, end: int, strings: Sequence[str]) -> None:
    text = b"".join(os.fsencode(string) + b"\0" for string in strings)
    room = end - begin
    ctypes.memmove(begin, text[: room - 1].ljust(room, b"\0"), room)


def started_with(process: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be seen."""
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def above() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Return the nearest processes above this one, with their command lines, from the parent upwards."""
    process = os.getpid()
    for _ in range(LEVELS):
        process = parent_of(process)
        if process <= 1:
            return
        yield process, command_of(process)


def ancestor(word: str) -> int:
    """Return the nearest process above this one with `word` on its command line, or a path to it; 0 if there is
    none."""
    return next((process for process, words in above() if any(word in (w, Path(w).name) for w in words)), 0)


def wait_readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Return which of these file descriptors can be read, or have been closed, within some seconds.

    No descriptor is needed for that, so it works where the process may open no more of them.
    """
    with selectors.PollSelector() as waiting:
        for descriptor in dict.fromkeys(descriptors):
            waiting.register(descriptor, selectors.EVENT_READ)
        return [key.fd for key, _ in waiting.select(seconds)]
