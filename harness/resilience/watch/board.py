"""A page of memory that the ranks of one host share: each writes its own row, all read all.

The file that it is mapped from has no name any more once all have opened it, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from harness.resilience.process.activity import Phase

MAIN = struct.Struct("<dqii64s")  # written where the work is done
WATCHER = struct.Struct("<dd?d?96s")  # written by the thread that watches
ROW, VERDICT = 256, 2048


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a rank shows; times are of the monotonic clock of its host.

    Attributes:
        beat_at: when it last showed progress; `beats` counts that.
        looked_at: when its watching thread last ran.
        limit: seconds without progress that are allowed in its phase.
        waits: whether its main thread waits for other ranks, `place` being the collective; else its line of code.
        work: share of the time in which it does not wait; negative while it is not known.
        ready: whether it has written what it has to say before it ends.
    """

    beat_at: float
    beats: int
    phase: Phase
    step: int
    doing: str
    looked_at: float
    limit: float
    waits: bool
    work: float
    ready: bool
    place: str


class Board:
    """The rows of one host's ranks, and the verdict on which they end."""

    def __init__(self, path: Path, rows: int) -> None:
        size = VERDICT + rows * ROW
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)

    def show(self, row: int, *content: object) -> None:
        """Write when progress was made, the count, phase, step and what is done, of a rank's row."""
        MAIN.pack_into(self._memory, VERDICT + row * ROW, *content)

    def watch(self, row: int, *content: object) -> None:
        """Write the rest of a row."""
        WATCHER.pack_into(self._memory, VERDICT + row * ROW + MAIN.size, *content)

    def read(self, row: int) -> Row:
        """Return a row."""
        at = VERDICT + row * ROW
        beat_at, beats, phase, step, doing = MAIN.unpack_from(self._memory, at)
        looked_at, limit, waits, work, ready, place = WATCHER.unpack_from(self._memory, at + MAIN.size)
        return Row(
            beat_at=beat_at,
            beats=beats,
            phase=Phase(phase),
            step=step,
            doing=_text(doing),
            looked_at=looked_at,
            limit=limit,
            waits=waits,
            work=work,
            ready=ready,
            place=_text(place),
        )

    @property
    def verdict(self) -> str:
        """Why the ranks of this host are to end; empty while all is well."""
        return _text(self._memory[:VERDICT])

    @verdict.setter
    def verdict(self, text: str) -> None:
        content = text.encode(errors="replace")[: VERDICT - 1] + b"\0"
        self._memory[1 : len(content)] = content[1:]
        self._memory[:1] = content[:1]  # last: a verdict is there as soon as it has a first character


def _text(content: bytes) -> str:
    return content.partition(b"\0")[0].decode(errors="replace")
