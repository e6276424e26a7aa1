"""What it costs that hosts watch each other: one second of the exchange between simulated hosts, without a network.

python scripts/bench/watching_hosts.py --hosts 128 512
"""

from __future__ import annotations

import argparse
import resource
import time
from datetime import timedelta

import torch.distributed as dist
from report import RESULTS, write_report

from harness.resilience.process.activity import Phase
from harness.resilience.watch import hosts
from harness.resilience.watch.diagnosis import RankStatus, diagnose
from harness.resilience.watch.hosts import OtherHosts

LOOKS = 5  # of the thread that watches, a second


class CountingStore(dist.Store):
    """A store that counts the bytes of the values that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}
        self.moved_bytes = 0

    def clone(self) -> CountingStore:
        return self

    def set_timeout(self, _timeout: object) -> None:
        pass

    def set(self, key: str, value: str | bytes) -> None:
        self.held[key] = value.encode() if isinstance(value, str) else bytes(value)
        self.moved_bytes += len(self.held[key])

    def get(self, key: str) -> bytes:
        self.moved_bytes += len(self.held[key])
        return self.held[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


def rank_status(rank: int, ranks: int) -> RankStatus:
    """Return a rank that trains."""
    return RankStatus(
        rank=rank, stage=rank % 4, host=f"host-{rank // ranks:04d}.cluster", pid=100_000 + rank, phase=Phase.STEP,
        step=1234, beats=1234 << 20, doing="ForwardPass(3)", still=0.1, unwatched=0.1, silent=0.0, limit=30.0,
        state="S", ending="", waits=True, place="all_reduce", work=0.5,
    )  # fmt: skip


def look(host: OtherHosts, rows: list[RankStatus], *, compares: bool = False) -> None:
    """Judge as the thread that watches does."""
    now = time.monotonic()
    host.show(rows)
    if compares or not (host.is_whole and host.is_well(rows, now)):
        verdict = diagnose([*rows, *host.statuses(now)], is_whole=host.is_whole)
        assert verdict is None


def seconds_of(host: OtherHosts, rows: list[RankStatus], *, compares: bool) -> float:
    """Return the processor time of a host's second; `compares`: whether it is one in which the ranks are compared."""
    begin = time.process_time()
    host.exchange()
    for number in range(LOOKS):
        look(host, rows, compares=compares and number == 0)
    return time.process_time() - begin


def exchange_all(made: list[OtherHosts], rows: list[list[RankStatus]]) -> None:
    """Let each host send and read once, as they do in a second."""
    for host, own in zip(made, rows, strict=True):
        host.show(own)
        host.exchange()


def store_seconds(count: int, rows: list[list[RankStatus]]) -> float:
    """Return the processor time that torch's store takes to serve all hosts for a second, by its own threads."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    made = [OtherHosts(store, number, count, "run") for number in range(count)]
    exchange_all(made, rows)
    whole, own = time.process_time(), time.thread_time()
    exchange_all(made, rows)
    return (time.process_time() - whole) - (time.thread_time() - own)


def measure(count: int, ranks: int) -> dict[str, float]:
    """Return the cost of one second for this number of hosts."""
    store = CountingStore()
    made = [OtherHosts(store, number, count, "run") for number in range(count)]
    rows = [
        [rank_status(rank, ranks) for rank in range(first, first + ranks)] for first in range(0, count * ranks, ranks)
    ]
    exchange_all(made, rows)
    made[0].exchange()
    store.moved_bytes = 0
    exchange_all(made, rows)
    return {
        "hosts": count,
        "ranks": count * ranks,
        "store_megabytes_per_second": store.moved_bytes / 1e6,
        "store_share_of_a_core": store_seconds(count, rows),
        "first_host_share_of_a_core": seconds_of(made[0], rows[0], compares=False),
        "first_host_when_it_compares_ranks": seconds_of(made[0], rows[0], compares=True),
        "another_host_share_of_a_core": seconds_of(made[1], rows[1], compares=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--ranks_per_host", type=int, default=8)
    flags = parser.parse_args()
    hosts.EVERY_S = 1e6  # no thread exchanges by itself
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each host has a connection of its own
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = [measure(count, flags.ranks_per_host) for count in flags.hosts]
    for row in found:
        print(", ".join(f"{name} {value:.3g}" for name, value in row.items()))
    print(write_report(RESULTS / "watching_hosts.json", {"flags": vars(flags), "found": found}, what=__doc__))


if __name__ == "__main__":
    main()
