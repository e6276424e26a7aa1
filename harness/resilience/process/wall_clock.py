"""Where the time of this process goes, for `run.json`. No torch: it begins before torch is imported."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTING = "starting"
"""What a process does until it says something else: it imports, reads its config and its data."""


class WallClock:
    """Seconds by activity, each second counted once: what an inner activity takes is not counted for the outer one."""

    def __init__(self, since: float) -> None:
        self._begin(since)
        os.register_at_fork(after_in_child=lambda: self._begin(time.monotonic()))  # a rank forked with imports done

    def _begin(self, since: float) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._doing, self._since = STARTING, since

    @contextmanager
    def spent_on(self, doing: str) -> Iterator[None]:
        """Count the time of the block for `doing`."""
        outer = self._turn_to(doing)
        try:
            yield
        finally:
            self._turn_to(outer)

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far, in the order in which the activities first ended, and `total`."""
        self._turn_to(self._doing)
        found = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return {**found, "total": round(sum(self._seconds.values()), 3)}

    def _turn_to(self, doing: str) -> str:
        now = time.monotonic()
        self._seconds[self._doing] += now - self._since
        outer, self._doing, self._since = self._doing, doing, now
        return outer


def _start_of_process() -> float:
    """Return when this process began, by the monotonic clock; now where the system does not tell."""
    now = time.monotonic()
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - age


CLOCK = WallClock(_start_of_process())
"""The clock of this process."""
