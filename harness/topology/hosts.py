"""Find which ranks share a host. Imports no torch."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return an identifier of this host: its name and the kernel's boot id."""
    # Two hosts may bear one name. Containers on one kernel have its boot id in common, but not always /dev/shm, so with
    # different names they count as different hosts.
    with suppress(OSError):
        return f"{socket.gethostname()} {BOOT_ID.read_text(encoding='ascii').strip()}"
    return socket.gethostname()


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run; `ids` has the host's identifier for each rank."""

    ids: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The name of each host, in the order of their first ranks."""
        return [each.partition(" ")[0] for each in dict.fromkeys(self.ids)]

    @property
    def numbers(self) -> list[int]:
        """The index of each rank's host."""
        order = {each: number for number, each in enumerate(dict.fromkeys(self.ids))}
        return [order[each] for each in self.ids]
