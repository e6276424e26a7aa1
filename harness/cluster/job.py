"""The settings of a run on a cluster, from which its job file is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster.

    Attributes:
        nodes: number of hosts.
        least: number of hosts that the run may shrink to.
        ranks: number of ranks on each host.
        gpus: whether each rank has a GPU.
        restarts: restarts after which `ds-harness launch` gives up.
        grace_s: seconds between the cluster's signal to end and its kill, in which the run saves.
        words: the training script and its arguments.
        volume: PersistentVolumeClaim that holds the output directory; `mount` is its path in the pods.
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
