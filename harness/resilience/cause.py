"""Find why a start ended: the first failure, from the ranks' own records and their exit codes."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness.resilience.on_host.ranks import Exit
from harness.resilience.process.records import HANG, STOPPED, Failure, Position

USAGE_ERROR = 2  # Python's and argparse's exit code for a command line that cannot be used
SAME_TIME_S = 1.0  # an error that a peer records within this time of a rank's death counts as its consequence
# fmt: off
OF_CODE = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "ConfigError", "FloatingPointError", "ImportError",
    "IndexError", "KeyError", "LookupError", "ModuleNotFoundError", "NameError", "NonFiniteStep", "NotImplementedError",
    "OutOfMemoryError", "OverflowError", "RuntimeError", "TypeError", "UnboundLocalError", "UnicodeDecodeError",
    "UserError", "UserErrors", "ValueError", "ZeroDivisionError",
})
# fmt: on
"""Errors that the same code and data are likely to raise again, unless their message names one of PASSING."""
PASSING = tuple(
    os.strerror(number).lower()
    for number in (
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        *(errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EAGAIN),
    )
)
"""The system's messages for a disk, network or host that may recover: they get longer pauses and more restarts."""
OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")
Device: TypeAlias = tuple[str, int]
"""Name of the host, and number of the device there."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What ended a start."""

    text: str  # one line for the user
    step: int = 0  # at which it happened; 0: before the first
    rank: int | None = None  # that failed first; None if it was no rank
    is_final: bool = False  # whether a restart would fail in the same way, because the user must fix it
    is_stop: bool = False  # whether a signal ended the ranks, after a checkpoint
    may_pass: bool = False  # whether it may go away by itself (a full disk, a network), unlike an error of the code
    code: int = 1  # exit code of the launch if there is no restart; more than 128: a signal to the launch itself
    device: Device | None = None  # of the rank that failed first, if known


def first_cause(
    failures: Sequence[Failure], exits: Sequence[Exit], positions: Mapping[int, Position], *, oom_kills: int | None
) -> Cause | None:
    """Return what happened first; None if no rank has failed.

    Args:
        failures: by time.
        exits: of ranks that exited by themselves, without success.
        positions: of all ranks, also of those that left no record.
        oom_kills: number of processes that the kernel killed for lack of memory meanwhile; None if unknown.
    """
    recorded = {failure.rank for failure in failures}
    # what others record of a rank that is stopped says only that they have lost it
    silent = [end for end in exits if end.rank not in recorded or end.code == -signal.SIGSTOP]
    killed = min((end for end in silent if end.code < 0), key=lambda end: end.time, default=None)
    own = next((failure for failure in failures if not failure.is_lost_peer), None)
    if killed is not None and (own is None or killed.time < own.time + SAME_TIME_S):
        position, reasons = positions[killed.rank], {None: "; killed by the system: memory?", 0: ""}
        reason = (
            reasons.get(oom_kills, "; killed by the system: out of memory") if killed.code == -signal.SIGKILL else ""
        )
        what = "stopped" if killed.code == -signal.SIGSTOP else "killed"
        text = f"{_who(position)} was {what} by {_name(-killed.code)} {_when(position)}{reason}"
        return Cause(text=text, step=position.step, rank=killed.rank, may_pass=True)
    if own is not None:
        return _recorded(own)
    if silent:
        first = min(silent, key=lambda end: end.time)
        return _silent(first, positions[first.rank])
    return _recorded(failures[0]) if failures else None


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory since boot; None if that is unknown."""
    counts = []
    for path in OOM_COUNTERS:
        with suppress(OSError, ValueError):
            lines = [line.split() for line in Path(path).read_text().splitlines()]
            counts += [int(line[1]) for line in lines if line[0] == "oom_kill"]
    return sum(counts) if counts else None


def _recorded(failure: Failure) -> Cause:
    if failure.error == STOPPED:
        number = int(failure.message) - 128 if failure.message.isdigit() else signal.SIGTERM
        text = f"the ranks were stopped by {_name(number)} after step {failure.step}"
        return Cause(text=text, step=failure.step, rank=failure.rank, is_stop=True, code=128 + number)
    message = f"{failure.error}: {failure.message}" if failure.message else failure.error
    return Cause(
        text=failure.message if failure.error == HANG else f"{_who(failure)} failed {_when(failure)}: {message}",
        step=failure.step,
        rank=failure.rank,
        is_final=failure.is_user_error and failure.step == 0,
        may_pass=failure.error not in OF_CODE or any(what in failure.message.lower() for what in PASSING),
    )


def _silent(end: Exit, position: Position) -> Cause:
    if end.code > 128 and end.code - 128 in set(signal.Signals):
        what = f"was ended by {_name(end.code - 128)}"
    else:
        what = f"ended with exit code {end.code} without a recorded error, before the run was complete,"
    return Cause(
        text=f"{_who(position)} {what} {_when(position)}",
        step=position.step,
        rank=end.rank,
        is_final=end.code == USAGE_ERROR and position.step == 0,
        may_pass=end.code != USAGE_ERROR,
        code=end.code if 0 < end.code <= 128 else 1,
    )


def _who(position: Position) -> str:
    stage = "" if position.stage is None else f", stage {position.stage}"
    return f"rank {position.rank} ({position.host}{stage})"


def _when(position: Position) -> str:
    if position.step == 0:
        return "before the first step"
    doing = "" if position.doing == "training" else f" ({position.doing})"
    return f"in step {position.step}{doing}"


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
