"""Find the other ranks of this launch on this host, in /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable

from harness.topology.env import LaunchEnv
from harness.topology.processes import all_processes, started_with

OF_A_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")  # variables that are equal for all ranks of a launch
POLL_S = 0.2  # interval at which a rank checks whether the others have come, or are gone


def ranks_among(processes: Iterable[int]) -> dict[int, str]:
    """Return process -> rank of the processes of this launch, by the environment they were started with."""
    # Not os.environ, to which this process may have added the variables that the others were not started with.
    ours = started_with(os.getpid())
    found: dict[int, str] = {}
    for process in processes if "RANK" in ours else ():
        theirs = started_with(process)
        if "RANK" in theirs and all(theirs.get(name) == ours.get(name) for name in OF_A_LAUNCH):
            found[process] = theirs["RANK"]
    return found


def may_come(env: LaunchEnv) -> bool:
    """Return whether a rank that this rank needs may still come: rank 0, or for rank 0 any other rank.

    False only if that is certain: all ranks belong to this host, and no such process is running.
    """
    if not env.on_one_host:
        return True
    ranks = set(ranks_among(all_processes()).values())
    # This process was not started with RANK, so the others need not be either.
    if str(env.rank) not in ranks:
        return True
    return bool(ranks - {"0"}) if env.rank == 0 else "0" in ranks
