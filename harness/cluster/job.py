"""The settings of a run on a cluster, from which its job file is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster."""

    name: str
    nodes: int  # number of hosts
    least: int  # number of hosts that the run may shrink to
    ranks: int  # number of ranks on each host
    gpus: bool  # whether each rank has a GPU
    restarts: int  # number of restarts after which `ds-harness launch` gives up
    grace_s: int  # seconds from the cluster's signal until it kills the run, which saves in that time
    words: tuple[str, ...]  # the training script and its arguments
    image: str = ""
    volume: str = ""  # PersistentVolumeClaim that holds the output directory
    mount: str = "/data"  # its path in the pods
    namespace: str = ""
    cpus: str = ""
    memory: str = ""
    shared_gib: int = 16  # size of /dev/shm in GiB
