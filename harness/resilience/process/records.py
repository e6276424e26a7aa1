"""Files by which a rank tells the supervisor of `ds-harness launch` its step, why it failed, or that it succeeded.

The environment variable DS_HARNESS_RECORDS names the folder of one attempt; without it nothing is written. No torch
here: a rank that fails before it imports torch leaves a record too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.checkpoint.atomic import UNFINISHED
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.topology.env import records_folder

SUCCESS = "success.json"
EXPECTED = "expected.json"  # says that this program will record success
STOPPED = "Stopped"  # the error of a rank that a signal ended after a checkpoint
HANG = "Hang"  # the error of a rank that makes no progress, recorded by another rank
LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "ncclremoteerror")


@dataclass(slots=True)
class Position:
    """What a rank is doing. Mutable and cheap to set, because it changes with every pipeline instruction.

    Attributes:
        stage: of the pipeline; None before the layout is known.
        step: current optimizer step, counted from 1; 0 before the first.
        doing: for instance "importing", "training", "saving", or a pipeline instruction.
    """

    rank: int = 0
    host: str = ""
    stage: int | None = None
    step: int = 0
    doing: str = "starting"


THIS_RANK = Position(host=socket.gethostname())
"""What this process is doing."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank ended, in its own words.

    Attributes:
        error: name of the exception's type.
        message: its first line.
        is_user_error: whether the user can fix it, and starting again would not.
        is_lost_peer: whether the error only says that the connection to another rank broke.
        time: seconds since the epoch.
    """

    rank: int
    host: str
    pid: int
    stage: int | None
    step: int
    doing: str
    error: str
    message: str
    is_user_error: bool
    is_lost_peer: bool
    time: float


def begin_step(step: int) -> None:
    """Set the current step, and write it to a file: a rank that is killed cannot report it later."""
    THIS_RANK.step, THIS_RANK.doing = step, "training"
    _write(f"position-{THIS_RANK.rank}.json", asdict(THIS_RANK))


def record_failure(error: BaseException) -> None:
    """Write why this rank fails."""
    lines = str(error).strip().splitlines()
    record_failure_of(
        THIS_RANK,
        os.getpid(),
        type(error).__name__,
        lines[0] if lines else "",
        is_user_error=isinstance(error, UserError),
        is_lost_peer=is_lost_peer(error),
    )


def record_failure_of(
    position: Position, pid: int, error: str, message: str, *, is_user_error: bool = False, is_lost_peer: bool = False
) -> None:
    """Write `rank-N.json` unless the rank has one: its first error is the cause.

    It may be another rank, which hangs or is stopped and cannot write it itself.
    """
    folder, name = records_folder(), f"rank-{position.rank}.json"
    if folder is None or (folder / name).exists():
        return
    failure = Failure(
        **asdict(position),
        pid=pid,
        error=error,
        message=message,
        is_user_error=is_user_error,
        is_lost_peer=is_lost_peer,
        time=time.time(),
    )
    _write(name, asdict(failure))


def expect_success() -> None:
    """Announce that this program records success, so that exit code 0 alone is none. Rank 0 writes it at the start."""
    if THIS_RANK.rank == 0:
        _write(EXPECTED, {"time": time.time()})


def record_success() -> None:
    """Record that all work is done. Rank 0 writes it at the very end."""
    if THIS_RANK.rank == 0:
        _write(SUCCESS, {"step": THIS_RANK.step, "time": time.time()})


def succeeded(folder: Path) -> bool | None:
    """Whether rank 0 has recorded success; None for a program that does not record it."""
    return (folder / SUCCESS).exists() or (None if not (folder / EXPECTED).exists() else False)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that the connection to another rank broke."""
    return any(sign in f"{type(error).__name__}: {error}".lower() for sign in LOST_PEER)


def read_failures(folder: Path) -> list[Failure]:
    """Return the failures that ranks have recorded, the first one first."""
    return sorted((Failure(**record) for record in _read(folder, "rank-*.json")), key=lambda failure: failure.time)


def read_positions(folder: Path) -> dict[int, Position]:
    """Return where each rank was at the beginning of its last step."""
    return {position.rank: position for position in (Position(**record) for record in _read(folder, "position-*.json"))}


def _write(name: str, record: dict[str, object]) -> None:
    """Write a record atomically. A failed write (a full disk) is ignored: it must not end the run."""
    folder = records_folder()
    if folder is None:
        return
    unfinished = folder / f"{UNFINISHED}{THIS_RANK.rank}-{name}"
    with suppress(OSError):
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(folder / name)


def _read(folder: Path, pattern: str) -> list[JsonObject]:
    records = []
    for path in sorted(folder.glob(pattern)):
        with suppress(OSError, ValueError):
            records.append(read_json(path))
    return records
