"""What this process is in the middle of, for the ranks that watch it. No torch: signal handling says goodbye here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from harness.resilience.process.records import THIS_RANK, is_lost_peer
from harness.resilience.process.wall_clock import CLOCK

NAMING_S = 10.0  # for the watch to end this process with the name of what was lost, which another host may find out

BEATS_OF_STEP = 1 << 20  # beats of a step count from a multiple of it, whatever callbacks a rank had before


class Phase(IntEnum):
    """How a rank that shows no progress is to be judged."""

    OUTSIDE = 0  # in the user's own code, or ended as it should: nobody waits for it
    STEP = 1  # in the engine's step or forward passes, where every instruction and layer is progress
    SLOW = 2  # preparing, saving, exporting, the user's own code: may take long, and reading and writing is progress
    FAILED = 3  # has raised an error that it reports itself
    LOST = 4  # has lost the connection to another rank, which is the one to name


@dataclass(slots=True)
class Activity:
    """The phase of this process, and a count of its progress; `records.THIS_RANK` says the rest.

    Attributes:
        steps: that this process has begun.
        publish: shows both to the other ranks at once; does nothing where nobody watches.
        stop_watching: ends the watch of this process, if there is one.
        stage_costs: what a step is expected to cost on each stage, in any unit; empty where that is not known.
        is_watched: whether there is a watch.
    """

    phase: Phase = Phase.OUTSIDE
    beats: int = 0
    steps: int = 0
    publish: Callable[[], None] = lambda: None
    stop_watching: Callable[[], None] = lambda: None
    stage_costs: Sequence[float] = ()
    is_watched: bool = False


ACTIVITY = Activity()
"""The activity of this process."""


def beat(doing: str) -> None:
    """Show progress: this rank now begins `doing`. It costs some microseconds."""
    THIS_RANK.doing = doing
    ACTIVITY.beats += 1
    ACTIVITY.publish()


def begin_step() -> None:
    """Show that a step begins, after its data was read."""
    ACTIVITY.steps += 1
    ACTIVITY.beats = ACTIVITY.steps * BEATS_OF_STEP
    beat("training")


def expect_costs(stages: Sequence[float]) -> None:
    """Note what a step is expected to cost on each stage."""
    ACTIVITY.stage_costs = stages


@contextmanager
def inside(doing: str, phase: Phase = Phase.SLOW) -> Iterator[None]:
    """Have the other ranks judge this one by `phase` in the block; an error that leaves the outermost one is shown."""
    outer, before = ACTIVITY.phase, THIS_RANK.doing
    ACTIVITY.phase = phase
    beat(doing)
    try:
        with CLOCK.spent_on(doing):
            yield
    except BaseException as error:
        if outer is not Phase.OUTSIDE:
            ACTIVITY.phase = outer
        elif not (isinstance(error, SystemExit) and not error.code):  # who just ends is missed by the others
            leave(error)
        raise
    ACTIVITY.phase = outer
    beat(before)


def leave(error: BaseException | None = None) -> None:
    """Show that this process is about to end: as it should, or by an error that it reports itself."""
    if error is None:
        ACTIVITY.phase = Phase.OUTSIDE
    elif ACTIVITY.phase not in (Phase.FAILED, Phase.LOST):
        ACTIVITY.phase = Phase.LOST if is_lost_peer(error) else Phase.FAILED
    ACTIVITY.publish()
    if ACTIVITY.phase is Phase.LOST and ACTIVITY.is_watched:
        time.sleep(NAMING_S)
