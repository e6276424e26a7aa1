"""The clocks of a profile: a device's, and how far those of other hosts are ahead of rank 0's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.device.moments import Moment, moment, seconds_between
from harness.device.process_group import shared_store
from harness.topology.agreement import all_gather_on_host, gather_object
from harness.topology.hosts import host_id

# How far each host's clock is ahead of rank 0's. All processes of a host share one clock (CLOCK_MONOTONIC, which
# `time.perf_counter` reads), so only the first rank of every other host asks rank 0 for its time. It takes the answer
# with the shortest round trip: its error is at most half of that.
ROUND_TRIPS = 9


@dataclass(frozen=True)
class Offset:
    """How many seconds a clock is ahead of rank 0's, and the largest error of that in seconds."""

    seconds: float = 0.0
    error: float = 0.0


def offset_to_first() -> Offset:
    """Return how far this process's clock is ahead of rank 0's; all ranks must call it."""
    rank = dist.get_rank()
    found = Offset()
    here = all_gather_on_host(host_id(), rank)
    leader = min(here.values)
    leaders = dict.fromkeys(gather_object(leader))
    if here.hosts > 1:
        store = dist.PrefixStore("clocks", shared_store())
        if rank == 0:
            answer(store, list(leaders)[1:], time.perf_counter)
        elif rank == leader:
            found = ask(store, rank, time.perf_counter)
    return all_gather_on_host(host_id(), found).values[leader]


def answer(store: dist.Store, ranks: Sequence[int], now: Callable[[], float]) -> None:
    """Answer each rank's requests for the time, `ROUND_TRIPS` of them."""
    for rank in ranks:
        for trip in range(ROUND_TRIPS):
            store.wait([f"{rank}/{trip}"])
            store.delete_key(f"{rank}/{trip}")  # so that a later call waits for its own
            store.set(f"{rank}/{trip}/time", repr(now()))


def ask(store: dist.Store, rank: int, now: Callable[[], float]) -> Offset:
    """Return how far the clock `now` is ahead of the clock that answers."""
    trips = []
    for trip in range(ROUND_TRIPS):
        sent = now()
        store.set(f"{rank}/{trip}", "")
        theirs = float(store.get(f"{rank}/{trip}/time"))
        received = now()
        store.delete_key(f"{rank}/{trip}/time")
        trips.append((received - sent, (sent + received) / 2 - theirs))
    seconds, ahead = min(trips)
    return Offset(ahead, seconds / 2)


@dataclass
class Clock:
    """Takes times on a device, on the scale of this process's `time.perf_counter`, without waiting during a step."""

    device: torch.device
    _base: tuple[float, Moment] = (0.0, 0.0)

    def start(self) -> None:
        """Begin a step; waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._base = time.perf_counter(), self.now()

    def now(self) -> Moment:
        """Return this moment (on an accelerator an event in its stream), to be handed to `seconds` later."""
        return moment(self.device)

    def seconds(self, at: Moment) -> float:
        """Return a moment in seconds of `time.perf_counter`; waits for the device to reach it."""
        begun, base = self._base
        return at if isinstance(at, float) else begun + seconds_between(base, at)
