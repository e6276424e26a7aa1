"""The phase and progress of this process, for the ranks that watch it. No torch here: signal handling uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from harness.resilience.process.records import THIS_RANK, is_lost_peer
from harness.wall_clock import CLOCK

NAMING_S = 10.0  # time for the watch to find which rank was lost, perhaps on another host, and to end this process
BEATS_OF_STEP = 1 << 20  # each step's count begins at a multiple of this, whatever a rank has counted between steps


class Phase(IntEnum):
    """What a rank does, as far as it decides how long it may go without progress and whether others wait for it."""

    OUTSIDE = 0  # outside of the harness's code, or ended normally: nobody waits for it
    STEP = 1  # in a training step or forward pass: each instruction and each layer counts as progress
    SLOW = 2  # preparing, saving, exporting, callbacks: may take long; reading and writing count as progress
    FAILED = 3  # has raised an error, and reports it itself
    LOST = 4  # has lost the connection to another rank: report the other rank, not this one


@dataclass(slots=True)
class Activity:
    """The phase of this process, and a count of its progress; `records.THIS_RANK` says the rest."""

    phase: Phase = Phase.OUTSIDE
    beats: int = 0
    steps: int = 0  # number of steps that this process has begun
    # Writes phase and count where the other ranks of the host read them; does nothing without a watch.
    publish: Callable[[], None] = lambda: None
    stop_watching: Callable[[], None] = lambda: None  # ends the watch of this process, if there is one
    stage_costs: Sequence[float] = ()  # expected cost of a step on each stage, in any unit; empty if unknown
    is_watched: bool = False


ACTIVITY = Activity()
"""The activity of this process."""


def beat(doing: str) -> None:
    """Count progress: this rank begins `doing`. Takes a few microseconds."""
    THIS_RANK.doing = doing
    ACTIVITY.beats += 1
    ACTIVITY.publish()


def begin_step() -> None:
    """Count the start of a step. Call it when the step's data has been read."""
    ACTIVITY.steps += 1
    ACTIVITY.beats = ACTIVITY.steps * BEATS_OF_STEP
    beat("training")


@contextmanager
def inside(doing: str, phase: Phase = Phase.SLOW) -> Iterator[None]:
    """Set activity and phase for a block. An error that leaves the outermost block is shown to the other ranks."""
    outer, before = ACTIVITY.phase, THIS_RANK.doing
    ACTIVITY.phase = phase
    beat(doing)
    try:
        with CLOCK.spent_on(doing):
            yield
    except BaseException as error:
        if outer is not Phase.OUTSIDE:
            ACTIVITY.phase = outer
        elif not isinstance(error, SystemExit) or error.code:  # exit code 0: the others see a rank that is gone
            leave(error)
        raise
    ACTIVITY.phase = outer
    beat(before)


def leave(error: BaseException | None = None) -> None:
    """Show that this process is about to exit: normally, or by an error that it reports itself."""
    if error is None:
        ACTIVITY.phase = Phase.OUTSIDE
    elif ACTIVITY.phase not in (Phase.FAILED, Phase.LOST):
        ACTIVITY.phase = Phase.LOST if is_lost_peer(error) else Phase.FAILED
    ACTIVITY.publish()
    if ACTIVITY.phase is Phase.LOST and ACTIVITY.is_watched:
        time.sleep(NAMING_S)
