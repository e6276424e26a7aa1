"""What hosts show each other through the store: two of them in one process, on a real store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from harness.resilience.process.activity import Phase
from harness.resilience.watch import hosts
from harness.resilience.watch.diagnosis import Diagnosis, RankStatus, diagnose
from harness.resilience.watch.hosts import OtherHosts
from harness.topology.signed_store import SignedStore
from tests.unit.resilience.watch.statuses import rank_status

VERDICT = Diagnosis(error="Hang", culprit=3, step=7, message="rank 3 hangs")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A store in this process, and exchanges a hundred times as often."""
    monkeypatch.setattr(hosts, "EVERY_S", 0.01)
    # torch asks the DNS for the peer's name at each connection; the system waits 5 s for an answer that was lost
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture
def made(store: dist.Store) -> Iterator[Callable[..., OtherHosts]]:
    found: list[OtherHosts] = []

    def make(here: int, count: int = 2, run: str = "run") -> OtherHosts:
        found.append(OtherHosts(store, here, count, run))
        return found[-1]

    yield make
    for each in found:
        each.close()
    for thread in threading.enumerate():
        if thread.name == "watch-hosts":
            thread.join()


def until(condition: Callable[[], object]) -> None:
    """Wait until the threads that exchange have done so."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def shown(*statuses: RankStatus) -> list[tuple[int, Phase, str]]:
    return [(each.rank, each.phase, each.doing) for each in statuses]


def test_the_first_host_sees_the_rows_of_all_others_and_these_see_its_own(made: Callable[..., OtherHosts]) -> None:
    first, second, third = (made(number, 3) for number in range(3))
    assert first.statuses(time.monotonic()) == [] and first.verdict() is None
    assert not any(each.is_whole for each in (first, second, third))
    first.show([rank_status(0, doing="übermäßig 🙂"), rank_status(1, phase=Phase.LOST)])
    second.show([rank_status(2)])
    third.show([rank_status(3)])
    until(lambda: len(third.statuses(0.0)) == 2 and len(first.statuses(0.0)) == 2)
    of_first = [(0, Phase.STEP, "übermäßig 🙂"), (1, Phase.LOST, "RecvGrad(1)")]
    assert shown(*third.statuses(0.0)) == of_first
    assert sorted(shown(*first.statuses(0.0))) == [(2, Phase.STEP, "RecvGrad(2)"), (3, Phase.STEP, "RecvGrad(3)")]
    assert first.is_whole and not second.is_whole and not third.is_whole  # one host judges for the run


WELL: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({"still": 31.0}, {}, True),  # it waits for one that makes progress
    ({"still": 31.0}, {"still": 31.0}, False),
    ({"still": 31.0}, {"still": 599.0, "limit": 600.0, "phase": Phase.SLOW}, True),
    ({"still": 31.0}, {"still": 9999.0, "limit": 0.0}, True),  # hangs are not looked for
    ({"state": ""}, {}, False),
    ({}, {"state": "Z"}, False),
    ({}, {"state": "T"}, False),
    ({}, {"phase": Phase.LOST}, False),
    ({}, {"phase": Phase.OUTSIDE}, False),
]


def test_rows_are_looked_at_where_something_may_be_wrong(made: Callable[..., OtherHosts]) -> None:
    first, second = made(0), made(1)
    for step, (here, there, well) in enumerate(WELL):
        first.show([rank_status(0)])
        second.show([rank_status(1, **there, step=step)])
        until(lambda step=step: [each.step for each in first.statuses(0.0)] == [step])
        own = [rank_status(0, **here)]
        assert first.is_well(own, time.monotonic()) == well, (here, there)
        assert not well or diagnose([*own, *first.statuses(time.monotonic())]) is None  # it hides no verdict
        assert not first.is_well(own, time.monotonic() + 7)  # the other has fallen silent


def test_a_host_that_does_not_hear_of_all_others_blames_nobody_for_a_hang(made: Callable[..., OtherHosts]) -> None:
    second = made(1)
    made(0).show([rank_status(0, still=31.0)])
    second.show([rank_status(1, still=31.0)])
    until(lambda: second.statuses(0.0))
    rows = [rank_status(1, still=31.0), *second.statuses(time.monotonic())]
    assert diagnose(rows, is_whole=second.is_whole) is None and diagnose(rows) is not None
    assert (
        diagnose([rank_status(1, still=31.0, state="T"), *rows[1:]], is_whole=False) is not None
    )  # this needs no other


def test_a_host_that_falls_silent_grows_still_until_it_is_heard_of_again(made: Callable[..., OtherHosts]) -> None:
    first, second = made(0), made(1)
    first.show([])
    second.show([rank_status(1, still=0.5)])
    until(lambda: first.statuses(0.0))
    heard = time.monotonic()
    (later,) = first.statuses(heard + 60)
    assert 60 <= later.silent < 66 and later.still == pytest.approx(later.silent + 0.5)
    second.show([rank_status(1, still=0.25)])
    until(lambda: first.statuses(0.0)[0].still - first.statuses(0.0)[0].silent == pytest.approx(0.25))
    second.close()
    (again,) = first.statuses(time.monotonic())
    assert again.silent < 5 and again.name == "rank 1 (stage 1, host a)"


def test_the_first_claim_counts_and_reaches_every_host_that_still_shows_itself(made: Callable[..., OtherHosts]) -> None:
    first, second = made(0), made(1)
    assert second.claim(VERDICT) is True
    assert first.claim(Diagnosis(error="Dead", culprit=0, step=1, message="")) is False
    assert first.verdict() is None  # it has shown nothing: another rank of it judges
    first.show([rank_status(0)])
    until(first.verdict)
    assert first.verdict() == VERDICT


def test_runs_that_share_a_store_hear_nothing_of_each_other(made: Callable[..., OtherHosts]) -> None:
    (first, _), (other, third) = [[made(number, run=run) for number in (0, 1)] for run in "ab"]
    for each in (first, other, third):
        each.show([rank_status(7)])
    assert other.claim(VERDICT) is True
    until(lambda: other.verdict() and other.statuses(0.0))
    assert first.statuses(0.0) == [] and first.verdict() is None
    assert first.claim(VERDICT) is True


def test_rows_that_are_too_old_are_not_sent_on(
    made: Callable[..., OtherHosts], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(0, 1)
    monkeypatch.setattr(hosts, "FRESH_S", -1.0)  # whatever is shown is too old
    first.show([rank_status(0)])
    time.sleep(0.1)
    assert store.get("watch/run/0") == b""
    monkeypatch.setattr(hosts, "FRESH_S", 3.0)
    first.show([rank_status(0)])
    until(lambda: store.get("watch/run/0"))
    digests, rows = map(json.loads, SignedStore(store, "watch/run/").get("0").split(b"\n"))
    assert digests[1:] == [pytest.approx(29.9), False] and rows[0][0] == 0


def test_a_claim_on_a_store_that_is_gone_is_this_hosts_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = OtherHosts(store, 0, 1, "run")
    first.close()
    del store  # and with it the server
    assert first.claim(VERDICT) is True
