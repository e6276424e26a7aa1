"""What is left for the user when the watch ends a run: one line, the stacks of all ranks, a record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.console import Console
from harness.resilience.process.records import HANG, HERE, Position, record_failure_of
from harness.resilience.watch.diagnosis import Sight, Verdict
from harness.resilience.watch.stacks import stacks


def stacks_file(output_dir: Path, step: int) -> Path:
    """Return where the stacks of a hang go."""
    return output_dir / f"hang-{step}.txt"


def announce(verdict: Verdict, sights: Sequence[Sight], path: Path, console: Console) -> None:
    """Report a verdict: on standard error, at the head of the file of stacks, and to a supervisor.

    Of a process that has ended the supervisor knows more itself.
    """
    message = verdict.message
    if verdict.error == HANG:
        message += f"; the Python stacks of all ranks are in {path}"
        stopped = [each for each in sights if each.state == "T"]
        lines = [verdict.message, "", *map(str, sights)]
        lines += [f"{each.name} is stopped, so it cannot write its stack" for each in stopped]
        _append(path, "\n".join(lines) + "\n")
    console.fail(message)
    named = HERE.rank if verdict.culprit < 0 else verdict.culprit
    for each in sights if verdict.error != "Dead" else []:
        if each.rank == named:
            position = Position(rank=each.rank, host=each.host, stage=each.stage, step=each.step, doing=each.doing)
            record_failure_of(position, each.pid, verdict.error, message)


def append_stacks(path: Path) -> None:
    """Add the stacks of this rank's threads."""
    _append(path, f"\n== rank {HERE.rank}, host {HERE.host}, step {HERE.step}, {HERE.doing} ==\n{stacks()}")


def _append(path: Path, text: str) -> None:
    """Append in one write, as all ranks write to this file; a full disk is not what ends a run."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
