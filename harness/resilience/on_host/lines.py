"""Whole lines from a file descriptor, without blocking."""

from __future__ import annotations

import os

from harness.topology.processes import wait_readable


class LineReader:
    """Reads whole lines from a file descriptor without blocking."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self._rest = b""

    def read(self) -> list[str]:
        """Return the complete lines that have arrived."""
        while not self.is_closed and wait_readable([self.descriptor], 0):
            chunk = os.read(self.descriptor, 1 << 16)
            self._rest += chunk
            self.is_closed = not chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]
