"""What this process is doing, for the ranks that watch it. No torch here, because signal handling uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from harness.resilience.process.records import THIS_RANK, is_lost_peer
from harness.wall_clock import CLOCK

NAMING_S = 10.0  # time for the watch to find which rank was lost, perhaps on another host, and to end this process

# The count of each step begins at a multiple of this: ranks stay comparable whatever they counted between steps.
BEATS_OF_STEP = 1 << 20


class Phase(IntEnum):
    """How long a rank may go without progress, and whether others wait for it."""

    OUTSIDE = 0  # in the user's own code, or ended as it should: nobody waits for it
    STEP = 1  # in the engine's step or forward passes, where every instruction and layer is progress
    SLOW = 2  # preparing, saving, exporting, the user's own code: may take long, and reading and writing is progress
    FAILED = 3  # has raised an error that it reports itself
    LOST = 4  # has lost the connection to another rank, which is the one to name


@dataclass(slots=True)
class Activity:
    """The phase of this process, and a count of its progress; `records.THIS_RANK` says the rest.

    Attributes:
        steps: number of steps that this process has begun.
        publish: writes phase and count where the other ranks of the host read them; does nothing without a watch.
        stop_watching: ends the watch of this process, if there is one.
        stage_costs: expected cost of a step on each stage, in any unit; empty if unknown.
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
    """Count progress: this rank begins `doing`. Costs a few microseconds."""
    THIS_RANK.doing = doing
    ACTIVITY.beats += 1
    ACTIVITY.publish()


def begin_step() -> None:
    """Count the begin of a step. Called after its data was read."""
    ACTIVITY.steps += 1
    ACTIVITY.beats = ACTIVITY.steps * BEATS_OF_STEP
    beat("training")


def expect_costs(stages: Sequence[float]) -> None:
    """Set the expected cost of a step on each stage."""
    ACTIVITY.stage_costs = stages


@contextmanager
def inside(doing: str, phase: Phase = Phase.SLOW) -> Iterator[None]:
    """Set activity and phase for a block. The other ranks see an error that leaves the outermost block."""
    outer, before = ACTIVITY.phase, THIS_RANK.doing
    ACTIVITY.phase = phase
    beat(doing)
    try:
        with CLOCK.spent_on(doing):
            yield
    except BaseException as error:
        if outer is not Phase.OUTSIDE:
            ACTIVITY.phase = outer
        elif not (
            isinstance(error, SystemExit) and not error.code
        ):  # the others see a plain exit as a rank that is gone
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
