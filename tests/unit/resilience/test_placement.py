"""Which groups cross hosts, and remedies that do what they say, held to the deepspeed launcher's own
parsers.
"""

import shlex
import socket

import pytest
from deepspeed.launcher.runner import parse_resource_filter
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.resilience.placement import (
    Crossing,
    Host,
    advise,
    crossings,
    host_of_ranks,
    hosts_of_launch,
    place,
)
from harness.topology.hosts import Hosts, host_id
from harness.topology.layout import Layout


def hosts(*slots: int) -> tuple[Host, ...]:
    return tuple(Host(name=f"worker-{index}", slots=size) for index, size in enumerate(slots))


def tensor_crossings(layout: Layout, machines: tuple[Host, ...]) -> list[Crossing]:
    return [crossing for crossing in crossings(layout, machines) if crossing.axis == "tensor"]


def test_a_launch_tells_its_hosts_by_the_ranks_on_each() -> None:
    in_order, in_turn = (Hosts(tuple(f"n{host} 1c9a" for host in dealt)) for dealt in ((7, 7, 7, 2), (7, 2, 7, 7)))
    assert hosts_of_launch(in_order) == hosts_of_launch(in_turn) == (Host(name="n7", slots=3), Host(name="n2", slots=1))
    assert (in_order.numbers, in_turn.numbers) == ([0, 0, 0, 1], [0, 1, 0, 0])
    assert Hosts((host_id(),)).names == [socket.gethostname()]
    same_name = Hosts(("localhost 1c9a", "localhost 77b0"))
    assert same_name.names == ["localhost"] * 2 and same_name.numbers == [0, 1]


def test_groups_that_are_torn_because_ranks_were_dealt_out_in_turn_are_told_so() -> None:
    layout, where = Layout(tp_size=2, dp_size=2), [0, 1, 0, 1]
    assert advise(layout, hosts(2, 2)) is None
    assert [crossing.ranks for crossing in crossings(layout, hosts(2, 2), where)] == [(0, 1), (2, 3)]
    told = str(advise(layout, hosts(2, 2), where))
    assert told.startswith("2 of 2 tensor-parallel groups of pp1 x dp2 x tp2 cross hosts (ranks 0, 1: worker-0 and")
    assert told.endswith(": give each host ranks that follow each other (`srun -m block`, `mpirun --map-by slot`)")
    assert advise(Layout(pp_size=2, tp_size=1, dp_size=2), hosts(2, 2), where) is None


def test_ranks_fill_the_hosts_in_order() -> None:
    assert host_of_ranks(5, hosts(2, 4)) == [0, 0, 1, 1, 1]
    with pytest.raises(UserError, match="7 ranks need as many slots, but the 2 hosts have 6"):
        host_of_ranks(7, hosts(2, 4))


def test_groups_inside_a_host_do_not_cross_but_a_pipeline_over_two_does() -> None:
    layout = Layout(pp_size=2, tp_size=2, dp_size=2)
    assert crossings(layout, hosts(8)) == []
    found = crossings(layout, hosts(4, 4))
    assert [crossing.ranks for crossing in found] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert {(crossing.axis, crossing.hosts) for crossing in found} == {("pipeline", (0, 1))}
    assert advise(layout, hosts(4, 4)) is None


def test_a_group_over_the_edge_of_a_host_is_told_with_a_remedy() -> None:
    layout = Layout(tp_size=4, dp_size=2)
    assert tensor_crossings(layout, hosts(6, 2)) == [Crossing(axis="tensor", ranks=(4, 5, 6, 7), hosts=(0, 0, 1, 1))]
    assert advise(layout, hosts(6, 2)) == (
        "1 of 2 tensor-parallel groups of pp1 x dp2 x tp4 cross hosts "
        "(ranks 4, 5, 6, 7: worker-0 and worker-1), "
        "and tensor parallelism is slow between hosts: set the tensor parallel size to 2 (pp1 x dp4 x tp2)"
    )


def test_spare_slots_are_left_unused_where_that_keeps_groups_whole() -> None:
    layout, machines = Layout(tp_size=4, dp_size=2), hosts(6, 6)
    assert place(layout, machines) == hosts(4, 4)
    assert "start with --include 'worker-0:0,1,2,3@worker-1:0,1,2,3'" in str(advise(layout, machines))


def test_a_host_too_small_for_a_group_is_passed_over() -> None:
    assert place(Layout(tp_size=4), hosts(2, 4)) == (Host(name="worker-1", slots=4),)
    assert place(Layout(tp_size=4), hosts(3, 3)) is None


@given(
    st.builds(lambda p, t, d: Layout(pp_size=p, tp_size=t, dp_size=d), *[st.integers(1, 4)] * 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_every_advice_ends_the_crossing(layout: Layout, slots: list[int]) -> None:
    machines = hosts(*slots)
    if sum(slots) < layout.world_size:
        return
    told = advise(layout, machines)
    assert (told is None) == (tensor_crossings(layout, machines) == [])
    if told and "--include" in told:
        include = shlex.split(told)[told.split().index("--include") + 1].rstrip(",")
        left = parse_resource_filter({host.name: list(range(host.slots)) for host in machines}, include)
        used = tuple(Host(name=name, slots=len(chosen)) for name, chosen in left.items())
        assert tensor_crossings(layout, used) == []
    elif told:
        size = int(told.split("parallel size to ")[1].split()[0])
        smaller = Layout.from_world(layout.world_size, pp_size=layout.pp_size, tp_size=size)
        assert tensor_crossings(smaller, machines) == []
