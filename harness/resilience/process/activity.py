"""The activity of this process: phase and progress for the watching ranks, and seconds by activity for `run.json`.

Imports no torch: signal handling uses it, and the clock counts from the start of the process.
"""

from __future__ import annotations

import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from harness.resilience.process.records import THIS_RANK, is_lost_peer

SHOWN = struct.Struct("<dqii64s")  # time of the last progress, its count, phase, step, activity
# Time for the watch to find the lost rank, perhaps on another host, and to end this process.
NAMING_S = 10.0
# Each step's count begins at a multiple of this, so that ranks are comparable whatever they count between steps.
BEATS_OF_STEP = 1 << 20


class Phase(IntEnum):
    """A rank's phase, which decides how long it may go without progress and whether others wait for it."""

    OUTSIDE = 0  # outside of the harness's code, or ended normally: nobody waits for it
    STEP = 1  # in a training step or forward pass: each instruction and each layer counts as progress
    SLOW = 2  # preparing, saving, exporting, callbacks: may take long; reading and writing count as progress
    FAILED = 3  # has raised an error, and reports it itself
    LOST = 4  # has lost the connection to another rank: report the other rank, not this one


@dataclass(slots=True)
class Activity:
    """The phase of this process and a count of its progress; `records.THIS_RANK` has the rest."""

    phase: Phase = Phase.OUTSIDE
    beats: int = 0
    steps: int = 0  # number of steps that this process has begun
    # Where `show` writes: if the run is watched, memory shared with the other ranks of the host.
    row: bytearray | memoryview = field(default_factory=lambda: bytearray(SHOWN.size))
    stop_watching: Callable[[], None] = lambda: None  # ends the watch of this process, if there is one
    stage_costs: Sequence[float] = ()  # expected cost of a step on each stage, in any unit; empty if unknown
    is_watched: bool = False

    def show(self) -> None:
        """Write phase and progress to `row`. Takes a few microseconds."""
        # One byte less than the field of SHOWN, so that the text always ends with a zero.
        doing = THIS_RANK.doing.encode()[:63]
        SHOWN.pack_into(self.row, 0, time.monotonic(), self.beats, self.phase, THIS_RANK.step, doing)


ACTIVITY = Activity()
"""The activity of this process."""


STARTING = "starting"
"""The first activity of a process: imports, config, data."""


class WallClock:
    """Seconds by activity. Each second counts once: the time of an inner activity is not added to the outer one."""

    def __init__(self, since: float) -> None:
        self._begin(since)
        # A standby process forks ranks after its imports, and its own time is not theirs.
        os.register_at_fork(after_in_child=lambda: self._begin(time.monotonic()))

    def _begin(self, since: float) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._doing = STARTING
        self._since = since
        self._longest: dict[str, float] = {}

    @contextmanager
    def spent_on(self, doing: str) -> Iterator[None]:
        """Count the time of the block for `doing`."""
        outer = self._turn_to(doing)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._turn_to(outer)
            self._longest[doing] = max(self._longest.get(doing, 0.0), time.monotonic() - begun)

    def longest_s(self, doing: str) -> float:
        """Return the seconds of the longest block of an activity so far, inner activities included."""
        return round(self._longest.get(doing, 0.0), 3)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by activity so far, in the order in which activities first ended, and `total`."""
        self._turn_to(self._doing)
        found = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return {**found, "total": round(sum(self._seconds.values()), 3)}

    def _turn_to(self, doing: str) -> str:
        now = time.monotonic()
        self._seconds[self._doing] += now - self._since
        self._since = now
        outer = self._doing
        self._doing = doing
        return outer


def _start_of_process() -> float:
    """Return the start of this process on the monotonic clock; the current time if it is unknown."""
    now = time.monotonic()
    try:
        # Field 22 of proc(5) is the start in clock ticks since boot, in which time asleep counts: hence CLOCK_BOOTTIME.
        # Fields are counted from behind the name, which may contain blanks.
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - age


CLOCK = WallClock(_start_of_process())
"""The clock of this process."""


def beat(doing: str) -> None:
    """Count progress: this rank begins `doing`."""
    THIS_RANK.doing = doing
    ACTIVITY.beats += 1
    ACTIVITY.show()


def count_step() -> None:
    """Count the start of a step; called after the step's data has been read."""
    # Not `THIS_RANK.step`, which a resumed or rolled back run sets: this number only grows.
    ACTIVITY.steps += 1
    ACTIVITY.beats = ACTIVITY.steps * BEATS_OF_STEP
    beat("training")


@contextmanager
def inside(doing: str, phase: Phase = Phase.SLOW) -> Iterator[None]:
    """Set activity and phase for a block. The other ranks see an error that leaves the outermost block."""
    outer = ACTIVITY.phase
    before = THIS_RANK.doing
    ACTIVITY.phase = phase
    beat(doing)
    try:
        with CLOCK.spent_on(doing):
            yield
    except BaseException as error:
        if outer is not Phase.OUTSIDE:
            ACTIVITY.phase = outer
        # After a SystemExit with code 0 there is no error to report: the others see that the rank has left.
        elif not isinstance(error, SystemExit) or error.code:
            leave(error)
        raise
    ACTIVITY.phase = outer
    beat(before)


def leave(error: BaseException | None = None) -> None:
    """Show that this process is about to exit, normally or because of an error that it reports itself."""
    if error is None:
        ACTIVITY.phase = Phase.OUTSIDE
    elif ACTIVITY.phase not in (Phase.FAILED, Phase.LOST):
        ACTIVITY.phase = Phase.LOST if is_lost_peer(error) else Phase.FAILED
    ACTIVITY.show()
    # Leave the watch time to find the lost rank and to end this process: an exit now would look like the cause.
    if ACTIVITY.phase is Phase.LOST and ACTIVITY.is_watched:
        time.sleep(NAMING_S)
