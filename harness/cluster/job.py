"""A run on a cluster, as its file is made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster.

    Attributes:
        least: number of hosts that the run may shrink to.
        ranks: on each host.
        grace_s: time that a save at the end may take.
        words: the script and its arguments.
        volume: claim that holds the output directory; `mount`: where pods see it.
        shared_gib: size of /dev/shm in GiB.
    """

    name: str
    nodes: int
    least: int
    ranks: int
    gpus: bool
    restarts: int
    grace_s: int
    words: tuple[str, ...]
    image: str = ""
    volume: str = ""
    mount: str = "/data"
    namespace: str = ""
    cpus: str = ""
    memory: str = ""
    shared_gib: int = 16
