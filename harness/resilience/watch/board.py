"""Shared memory of the ranks of one host: each rank writes its own row and reads all rows.

The mapped file is unlinked once all ranks have opened it, so a run that is killed leaves nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from harness.resilience.process.activity import SHOWN, Phase

WATCHER = struct.Struct("<dd?d?96s")  # written by the watching thread, behind SHOWN
ROW, VERDICT = 256, 2048


class Row(NamedTuple):
    """What a rank shows. Times are of the monotonic clock of its host."""

    beat_at: float  # time of its last progress
    beats: int  # count of its progress
    phase: Phase
    step: int
    doing: str
    looked_at: float  # time at which its watching thread last ran
    limit: float  # seconds without progress that its phase allows
    waits: bool  # whether its main thread waits for other ranks
    work: float  # share of the time in which it does not wait; negative while unknown
    ready: bool  # whether it has written its stacks and may be ended
    place: str  # the collective that it waits in, else its line of code


class Board:
    """The rows of one host's ranks, and the verdict that ends them."""

    def __init__(self, path: Path, rows: int) -> None:
        size = VERDICT + rows * ROW
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)

    def row(self, row: int) -> memoryview:
        """Return the memory of the part of a row that its rank's main thread writes, as `Activity.show` does."""
        at = VERDICT + row * ROW
        return memoryview(self._memory)[at : at + SHOWN.size]

    def watch(self, row: int, *content: object) -> None:
        """Write the fields of WATCHER to a row."""
        WATCHER.pack_into(self._memory, VERDICT + row * ROW + SHOWN.size, *content)

    def read(self, row: int) -> Row:
        """Return a row."""
        at = VERDICT + row * ROW
        beat_at, beats, phase, step, doing = SHOWN.unpack_from(self._memory, at)
        *watched, place = WATCHER.unpack_from(self._memory, at + SHOWN.size)
        return Row._make((beat_at, beats, Phase(phase), step, _text(doing), *watched, _text(place)))

    @property
    def verdict(self) -> str:
        """Why the ranks of this host must end; empty while all is well."""
        return _text(self._memory[:VERDICT])

    @verdict.setter
    def verdict(self, text: str) -> None:
        content = text.encode(errors="replace")[: VERDICT - 1] + b"\0"
        self._memory[1 : len(content)] = content[1:]
        self._memory[:1] = content[:1]  # last: for readers a verdict is complete once its first byte is set


def _text(content: bytes) -> str:
    return content.partition(b"\0")[0].decode(errors="replace")
