"""Two hosts with a cable of a given rate between them, as network namespaces of this machine. Needs root and iproute2.

A process in a namespace sees another host's name and address, so programs take the two for machines of their own, and
what they send each other goes through the cable's queue.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.77.0"


@dataclass(frozen=True)
class Host:
    """One end of a cable.

    Attributes:
        name: of its network namespace.
        address: on the cable.
        interface: the name of the cable's end, for GLOO_SOCKET_IFNAME.
    """

    name: str
    address: str
    interface: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on this host."""
        inside = f'hostname {self.name}; exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", inside, "sh", *words]


@contextmanager
def two_hosts(mbit: int) -> Iterator[tuple[Host, Host]]:
    """Make two hosts and a cable of `mbit` Mbit/s in each direction, 0 for no limit; remove them at the end."""
    prefix = f"cable{os.getpid() % 10000}"
    first, second = (Host(f"{prefix}h{end}", f"{NETWORK}.{end + 1}", f"{prefix}e{end}") for end in range(2))
    try:
        for host in (first, second):
            _ip("netns", "add", host.name)
        _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host in (first, second):
            _ip("link", "set", host.interface, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for name in (host.interface, "lo"):
                _ip("-n", host.name, "link", "set", name, "up")
            if mbit:  # a token bucket: bursts of a few packets, and a queue that delays before it drops
                limit = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
                queue = ["tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root", "tbf", *limit]
                subprocess.run(queue, check=True)
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
