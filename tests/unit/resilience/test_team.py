"""Which hosts of a start get ranks, in which layout, and how many."""

from __future__ import annotations

import pytest

from harness.resilience.cause import Device
from harness.resilience.script import Script, Start
from harness.resilience.team import Offer, Team, _used, team_of
from harness.topology.layout import Layout

KNOWN = ("scripts/train.py", "--deepspeed_config", "tensor_parallel", "--max_steps", "9")


def offer(host: str, count: int = 2, position: int = 0) -> Offer:
    devices = tuple(range(count))
    return Offer(node=f"{host}_1_0", host=host, address=host, position=position, devices=devices, port=1)


def team(*offers: Offer, failing: tuple[Device, ...] = (), fewest: int = 1) -> Team:
    return team_of(offers, failing, Script(KNOWN), 4, fewest)


def devices(found: Team) -> list[Device | None]:
    ranks = sum(len(each.devices) for each in found.offers)
    return [found.device(rank) for rank in range(ranks)]


def test_all_hosts_start_as_the_user_asked_in_the_order_of_their_positions() -> None:
    found = team(offer("b", position=1), offer("a", position=0))
    assert found.start == Start(words=KNOWN, ranks=4)
    assert devices(found) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert found.device(9) is None and found.device(None) is None


def test_fewer_hosts_get_another_layout() -> None:
    found = team(offer("a"))
    assert str(found.start) == "pp1 x dp1 x tp2 on 2 ranks"
    assert found.start is not None and "--global_batch_size" in found.start.words


@pytest.mark.parametrize(
    ("failing", "fewest", "available"),
    [
        pytest.param((("a", 1),), 4, 3, id="fewer devices than wanted"),
        pytest.param((("a", 0), ("a", 1), ("b", 0), ("b", 1)), 1, 0, id="none left"),
    ],
)
def test_too_few_start_nothing(failing: tuple[Device, ...], fewest: int, available: int) -> None:
    found = team(offer("a"), offer("b"), failing=failing, fewest=fewest)
    assert (found.start, found.available, devices(found)) == (None, available, [])


def test_a_device_that_is_left_out_leaves_its_host_the_others() -> None:
    found = team(offer("a"), offer("b"), failing=(("a", 0),))
    assert found.start is not None and found.start.ranks == 2  # tp2: two of the three that are left
    assert devices(found) == [("b", 0), ("b", 1)]  # which share a host; the other one has no rank
    assert [each.host for each in found.offers] == ["b", "a"]


@pytest.mark.parametrize(
    ("slots", "start", "used"),
    [
        pytest.param([3, 3], Start(words=(), ranks=4), [(0, 1, 2), (0,)], id="as many as are wanted"),
        pytest.param([2, 2, 2], Start(words=(), ranks=4), [(0, 1), (0, 1), ()], id="a host is not needed"),
        pytest.param(
            [3, 3, 3],
            Start(words=(), ranks=6, layout=Layout(pp_size=1, tp_size=2, dp_size=3)),
            [(0, 1), (0, 1), (0, 1)],
            id="tensor-parallel groups share hosts",
        ),
        pytest.param(
            [1, 2],
            Start(words=(), ranks=2, layout=Layout(pp_size=1, tp_size=2, dp_size=1)),
            [(0, 1), ()],
            id="a host too small for a group",
        ),
        pytest.param(
            [1, 1],
            Start(words=(), ranks=2, layout=Layout(pp_size=1, tp_size=2, dp_size=1)),
            [(0,), (0,)],
            id="where no host holds a group it is torn",
        ),
    ],
)
def test_devices_are_cut_to_what_the_start_needs(slots: list[int], start: Start, used: list[tuple[int, ...]]) -> None:
    offers = [offer(f"host-{number}", count, number) for number, count in enumerate(slots)]
    assert [each.devices for each in _used(offers, start)] == used
