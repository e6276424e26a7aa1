"""What the supervisor and the agent of a host say to each other: lines over two pipes, by way of ssh or srun too."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from harness.topology.processes import wait_readable

MARK = "\x1e"  # how a line begins that an agent writes itself; others are what ranks have printed


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a line to an agent says of an attempt.

    Attributes:
        records: folder for the records of the attempt.
        folder: in which the ranks run.
        environment: of all ranks of this host, besides what the agent has.
        out: file descriptor that the ranks print to; None: the agent's own standard output.
    """

    records: str
    folder: str
    environment: dict[str, str]
    out: int | None = None

    def line(self) -> bytes:
        """Return the line."""
        return json.dumps({type(self).__name__: asdict(self)}).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Preparation(Message):
    """What an agent makes ready for a start that may come.

    Attributes:
        modules: to import.
    """

    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Order(Message):
    """What an agent starts.

    Attributes:
        root: folder of the records of all attempts of the run.
        ranks: number, command and further environment of each rank on this host.
        is_remote: whether the connection may be cut without an end of the input.
        stopped_s: ranks that are all stopped for so long are ended (0: never); of a single one its peers take notice.
    """

    root: str
    ranks: list[tuple[int, list[str], dict[str, str]]]
    is_remote: bool = False
    stopped_s: float = 0.0


def read_message(line: str) -> Preparation | Order:
    """Return what a line says that was made by `line()`."""
    ((kind, fields),) = json.loads(line).items()
    return Order(**fields) if kind == Order.__name__ else Preparation(**fields)


class LineReader:
    """Whole lines from a file descriptor, as they come."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self._rest = b""

    def read(self) -> list[str]:
        """Return the lines that are there now."""
        while not self.is_closed and wait_readable([self.descriptor], 0):
            chunk = os.read(self.descriptor, 1 << 16)
            self._rest += chunk
            self.is_closed = not chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]
