"""Which host a process runs on: its own word, never reckoned from ranks, which launchers may deal out in any order."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return what processes of one host have in common, and no others: its name, and the running kernel's own.

    Containers with names of their own are hosts of their own.
    """
    with suppress(OSError):
        return f"{socket.gethostname()} {BOOT_ID.read_text(encoding='ascii').strip()}"
    return socket.gethostname()


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run; `ids`: that of each rank."""

    ids: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The name of each host, in the order of their first ranks."""
        return [each.partition(" ")[0] for each in dict.fromkeys(self.ids)]

    @property
    def numbers(self) -> list[int]:
        """The number of each rank's host."""
        order = {each: number for number, each in enumerate(dict.fromkeys(self.ids))}
        return [order[each] for each in self.ids]

    def ranks_beside(self, rank: int) -> Sequence[int]:
        """Return the ranks of one's host, its own among them."""
        return [other for other, each in enumerate(self.ids) if each == self.ids[rank]]
