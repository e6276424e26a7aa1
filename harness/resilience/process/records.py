"""Record a rank's step, failure or success in files for `ds-harness launch`.

The environment variable DS_HARNESS_RECORDS names the folder of one start; without it nothing is written. Imports no
torch, so that a rank that fails before importing torch leaves a record too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from harness.atomic import UNFINISHED
from harness.config.values.json_file import read_json
from harness.errors import UserError
from harness.topology.env import records_folder

T = TypeVar("T")
SUCCESS = "success.json"
EXPECTED = "expected.json"  # says that this program will record success
STOPPED = "Stopped"  # the error of a rank that a signal ended after a checkpoint
HANG = "Hang"  # the error of a rank that makes no progress, recorded by another rank
LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "ncclremoteerror")


@dataclass
class Position:
    """The current activity of a rank. Mutable and cheap to set, because it changes with every pipeline instruction."""

    rank: int = 0
    host: str = ""
    stage: int | None = None  # of the pipeline; None before the layout is known
    step: int = 0  # current optimizer step, counted from 1; 0 before the first
    doing: str = "starting"  # for instance "importing", "training", "saving", or a pipeline instruction


THIS_RANK = Position(host=socket.gethostname())
"""The current activity of this process."""


@dataclass(kw_only=True)
class Failure(Position):
    """Why a rank failed, and its activity at that time."""

    pid: int
    error: str  # name of the exception's type
    message: str  # its first line
    is_user_error: bool = False  # whether the user must fix it, so that a restart would fail in the same way
    is_lost_peer: bool = False  # whether the error only says that the connection to another rank broke
    time: float  # seconds since the epoch


def record_step() -> None:
    """Record the current step, as a killed rank cannot report it later."""
    _write(f"position-{THIS_RANK.rank}.json", asdict(THIS_RANK))


def record_failure(error: BaseException) -> None:
    """Record why this rank failed."""
    kinds = {"is_user_error": isinstance(error, UserError), "is_lost_peer": is_lost_peer(error)}
    record_failure_of(THIS_RANK, os.getpid(), type(error).__name__, str(error), **kinds)


def record_failure_of(
    position: Position, pid: int, error: str, message: str, *, is_user_error: bool = False, is_lost_peer: bool = False
) -> None:
    """Record why a rank failed. The watchdog calls this for ranks that hang or are stopped."""
    folder = records_folder()
    name = f"rank-{position.rank}.json"
    # A rank's first error is the cause: later ones follow from it.
    if folder is not None and not (folder / name).exists():
        line = (message.strip().splitlines() or [""])[0]
        own = asdict(Failure(**asdict(position), pid=pid, error=error, message=line, time=time.time()))
        _write(name, {**own, "is_user_error": is_user_error, "is_lost_peer": is_lost_peer})


def expect_success() -> None:
    """Announce that this program records success, so that exit code 0 alone does not count. Only rank 0 writes."""
    if THIS_RANK.rank == 0:
        _write(EXPECTED, {"time": time.time()})


def record_success() -> None:
    """Record that all work is done. Only rank 0 writes, at the very end."""
    if THIS_RANK.rank == 0:
        _write(SUCCESS, {"step": THIS_RANK.step, "time": time.time()})


def succeeded(folder: Path) -> bool | None:
    """Return whether rank 0 has recorded success; None for a program that does not record it."""
    return (folder / SUCCESS).exists() or (False if (folder / EXPECTED).exists() else None)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only reports a broken connection to another rank."""
    # By its text, as gloo and NCCL raise errors of general types.
    return any(sign in f"{type(error).__name__}: {error}".lower() for sign in LOST_PEER)


def read_failures(folder: Path) -> list[Failure]:
    """Return the recorded failures of all ranks, oldest first."""
    return sorted(_read(folder, "rank-*.json", Failure), key=lambda failure: failure.time)


def read_positions(folder: Path) -> dict[int, Position]:
    """Return each rank's position at the start of its last step."""
    return {position.rank: position for position in _read(folder, "position-*.json", Position)}


def _write(name: str, record: dict[str, object]) -> None:
    """Write a record atomically. A failed write (a full disk) is ignored, as it must not end the run."""
    # Not by `harness.atomic`, whose wait for the disk would delay each step.
    if (folder := records_folder()) is not None:
        unfinished = folder / f"{UNFINISHED}{THIS_RANK.rank}-{name}"
        with suppress(OSError):
            unfinished.write_text(json.dumps(record), encoding="utf-8")
            unfinished.replace(folder / name)


def _read(folder: Path, pattern: str, kind: Callable[..., T]) -> list[T]:
    records = []
    for path in sorted(folder.glob(pattern)):
        # Removed, or cut off by a full disk.
        with suppress(OSError, ValueError):
            records.append(kind(**read_json(path)))
    return records
