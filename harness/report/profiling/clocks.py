"""One time for the ranks of several hosts: how far each host's clock is ahead of rank 0's.

The processes of a host share a clock (CLOCK_MONOTONIC, which `time.perf_counter` reads). The first rank of every other
host asks rank 0 for its time; the answer that comes back fastest is the most exact: it is off by half its round trip
at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from harness.resilience.process.distributed import shared_store
from harness.topology.agreement import values_of_all
from harness.topology.placement import host_id

ROUND_TRIPS = 9


@dataclass(frozen=True)
class Offset:
    """How many seconds a clock shows more than rank 0's, and by how much that may be off."""

    seconds: float = 0.0
    error: float = 0.0


def offset_to_first(place: str) -> Offset:
    """Return how far this process's clock is ahead of rank 0's; all ranks call it. `place` names the call."""
    hosts = values_of_all(host_id())
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    rank, found = dist.get_rank(), Offset()
    if len(leaders) > 1:
        store = dist.PrefixStore(f"clocks {place}", shared_store())
        if rank == 0:
            answer(store, leaders[1:], time.perf_counter)
        elif rank in leaders:
            found = ask(store, rank, time.perf_counter)
    return values_of_all(found)[hosts.index(hosts[rank])]


def answer(store: dist.Store, ranks: Sequence[int], now: Callable[[], float]) -> None:
    """Tell each rank the time, as often as it asks."""
    for rank in ranks:
        for trip in range(ROUND_TRIPS):
            store.wait([f"{rank}/{trip}"])
            store.set(f"{rank}/{trip}/time", repr(now()))


def ask(store: dist.Store, rank: int, now: Callable[[], float]) -> Offset:
    """Return how far the clock `now` is ahead of the one that answers."""
    trips = []
    for trip in range(ROUND_TRIPS):
        sent = now()
        store.set(f"{rank}/{trip}", "")
        theirs = float(store.get(f"{rank}/{trip}/time"))
        received = now()
        trips.append((received - sent, (sent + received) / 2 - theirs))
    seconds, ahead = min(trips)
    return Offset(ahead, seconds / 2)
