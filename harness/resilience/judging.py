"""Decide after each start whether the run ends or starts again, when, and what the user is told: pure rules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from harness.resilience.cause import Cause, Device
from harness.wording import counted

SAME_STEP = 3  # give up after this many errors of the code in a row at one step
SAME_STEP_ELSEWHERE = 5  # the same for faults that may pass: a full disk, a network
PAUSE_S = 2.0  # before a restart at the same step
PAUSES_S = (10.0, 60.0, 300.0)  # the same for faults that may pass: before the second, the third and later restarts


@dataclass(frozen=True, kw_only=True)
class History:
    """What all agents must know of a run. Its leader keeps it in the store: another agent may become the leader."""

    start: int = -1  # number of the current start, from 0; -1 before the first
    is_open: bool = False  # whether the current start has not been judged
    faults: tuple[Cause, ...] = ()  # causes that led to a restart
    failing: tuple[Device, ...] = ()  # devices that are left out
    earlier: frozenset[tuple[int, int]] | None = None  # `Script.earlier` at the first start
    gone: tuple[str, ...] = ()  # names, in the rendezvous, of agents that were lost or have left


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the agents do after a start."""

    code: int | None = None  # exit code of the launch; None to start again
    pause: float = 0.0  # seconds before that
    lines: tuple[str, ...] = ()  # what the user is told


def judge(
    history: History, cause: Cause | None, *, most: int, leaves_out: bool, received: int = 0, goes_on: str = ""
) -> tuple[Verdict, History]:
    """Return what follows a start that `cause` ended (None: success), and the history with it.

    Args:
        most: number of restarts that are allowed.
        leaves_out: whether a device may be left out (`--min_ranks`).
        received: signal that asked the launch to end; 0 if none did.
        goes_on: reason to start again after ranks saved and stopped (hosts joined or left); "" if none.
    """
    history = replace(history, is_open=False)
    restarts = len(history.faults)
    lines = []
    if cause is None:
        return Verdict(code=0, lines=(f"done, after {counted(restarts, 'restart')}",) if restarts else ()), history
    if goes_on and (cause.is_stop or received):
        return Verdict(lines=(goes_on,)), history
    if received:
        return Verdict(code=128 + received), history
    if not (cause.is_final and cause.rank == 0):  # rank 0 has printed the error itself
        lines.append(cause.text)
    if cause.is_final and restarts == 0:
        return Verdict(code=cause.code, lines=tuple(lines)), history
    faults = (*history.faults, cause)
    history = replace(history, faults=faults)
    same = len(list(itertools.takewhile(lambda fault: fault.step == cause.step, reversed(faults))))
    if restarts == most or same >= (SAME_STEP_ELSEWHERE if cause.may_pass else SAME_STEP):
        if most:
            used_up = f"{counted(most, 'restart')} {'is' if most == 1 else 'are'} used up"
            why = used_up if restarts == most else f"{same} faults in a row at step {cause.step}"
            lines.append("\n  ".join([f"gave up: {why}", *(f"step {fault.step}: {fault.text}" for fault in faults)]))
        return Verdict(code=cause.code, lines=tuple(lines)), history
    is_twice = [(each.step, each.device) for each in faults[-2:]] == [(0, cause.device)] * 2
    out = cause.device if leaves_out and is_twice else None
    if out is not None:
        history = replace(history, failing=(*history.failing, out))
        lines.append(f"device {out[1]} of {out[0]} is left out: it failed twice before the first step")
    # a start that a full disk ends before its first step counts as a fault at the same step
    stuck = same + (cause.is_final and cause.may_pass and len(faults) > same)
    pause = 0.0 if stuck == 1 or out is not None else PAUSE_S
    if pause and cause.may_pass:
        pause = PAUSES_S[min(stuck - 2, len(PAUSES_S) - 1)]
    lines.append(f"restart {restarts + 1} of {most}{f' in {pause:.0f} s' if pause else ''}")
    return Verdict(pause=pause, lines=tuple(lines)), history
