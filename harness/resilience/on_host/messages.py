"""The protocol between supervisor and agent: lines of JSON over two pipes, through ssh or srun for another host."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from harness.topology.processes import wait_readable

MARK = "\x1e"  # first character of an agent's own lines; all others are output of its ranks


@dataclass(frozen=True, kw_only=True)
class Message:
    """What an agent is told of an attempt.

    Attributes:
        records: folder for the records of the attempt.
        folder: in which the ranks run.
        environment: variables for all ranks of this host, added to the agent's own.
        out: file descriptor for the ranks' output; None: the agent's stdout.
    """

    records: str
    folder: str
    environment: dict[str, str]
    out: int | None = None

    def line(self) -> bytes:
        """Serialise as one line."""
        return json.dumps({type(self).__name__: asdict(self)}).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Preparation(Message):
    """What an agent prepares for the next attempt.

    Attributes:
        modules: to import.
    """

    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Order(Message):
    """What an agent starts now.

    Attributes:
        root: folder of the records of all attempts of the run.
        ranks: number, command and further environment of each rank on this host.
        is_remote: whether the connection may break without an end of file.
        stopped_s: time after which the agent kills ranks that are all stopped (0: never). If only some are, the
            others notice.
    """

    root: str
    ranks: list[tuple[int, list[str], dict[str, str]]]
    is_remote: bool = False
    stopped_s: float = 0.0


def read_message(line: str) -> Preparation | Order:
    """Parse a line that `line` has made."""
    ((kind, fields),) = json.loads(line).items()
    return Order(**fields) if kind == Order.__name__ else Preparation(**fields)


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
