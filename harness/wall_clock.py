"""Wall-clock time of this process by activity, for `run.json`. No torch here: the count begins before its import."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTING = "starting"
"""The first activity of a process: imports, config, data."""


class WallClock:
    """Seconds by activity. Each second counts once: time of an inner activity is not added to the outer one."""

    def __init__(self, since: float) -> None:
        self._begin(since)
        os.register_at_fork(after_in_child=lambda: self._begin(time.monotonic()))  # a rank forked with imports done

    def _begin(self, since: float) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._doing = STARTING
        self._since = since
        self._longest: dict[str, float] = {}

    @contextmanager
    def spent_on(self, doing: str) -> Iterator[None]:
        """Count the time of the block for `doing`."""
        outer, begun = self._turn_to(doing), time.monotonic()
        try:
            yield
        finally:
            self._turn_to(outer)
            self._longest[doing] = max(self._longest.get(doing, 0.0), time.monotonic() - begun)

    def longest_s(self, doing: str) -> float:
        """Return the seconds of the longest block of an activity so far, with what was done inside it."""
        return round(self._longest.get(doing, 0.0), 3)

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
    """Return the start of this process on the monotonic clock; the current time if the system does not tell."""
    now = time.monotonic()
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - age


CLOCK = WallClock(_start_of_process())
"""The clock of this process."""
