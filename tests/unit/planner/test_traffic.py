"""Collectives and messages, worked by hand on a node of eight at 100 bytes/s and a network at 10."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.planner.traffic import (
    START_SECONDS,
    Group,
    all_reduce,
    collective,
    data_group,
    expert_exchange,
    expert_group,
    expert_ranks,
    group_along,
    half_ring,
    message,
    tensor_group,
)
from harness.planner.workload import Strategy
from tests.unit.planner.devices import device

HARDWARE = device()


@pytest.mark.parametrize(
    ("size", "stride", "rate", "ring", "tree"),
    [
        pytest.param(8, 1, 100, 7, 3, id="a whole node"),
        pytest.param(5, 1, 100, 4, 3, id="a part of a node, no power of two"),
        pytest.param(2, 4, 100, 1, 1, id="two of a node, four apart"),
        pytest.param(16, 1, 80, 14 + 200, 3 + 100, id="two nodes, whose members share eight adapters"),
        pytest.param(12, 1, 80, 10 + 200, 3 + 100, id="a node and a half"),
        pytest.param(6, 4, 20, 3 + 300, 1 + 200, id="two of each of three nodes"),
        pytest.param(8, 8, 10, 800, 300, id="one of each node"),
        pytest.param(4, 32, 10, 400, 200, id="ranks that lie nodes apart"),
        pytest.param(128, 1, 80, 112 + 1600, 3 + 400, id="sixteen nodes"),
    ],
)
def test_a_group_has_the_way_of_its_slowest_neighbours(
    size: int, stride: int, rate: float, ring: float, tree: float
) -> None:
    group = group_along(HARDWARE, size, stride)
    assert (group.size, group.bytes_per_second, group.ring_seconds, group.tree_seconds) == (size, rate, ring, tree)


def test_many_adapters_are_no_faster_than_the_way_inside_the_node() -> None:
    fast = device(network=HARDWARE.node)
    assert group_along(fast, 16, 1).bytes_per_second == HARDWARE.node.bytes_per_second


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (1, 64)])
def test_a_rank_alone_talks_to_nobody(size: int, stride: int) -> None:
    alone = group_along(HARDWARE, size, stride)
    assert (alone.ring_seconds, alone.tree_seconds) == (0, 0)
    assert half_ring(alone, 1e12) == all_reduce(alone, 1e12) == 0


def test_an_all_reduce_goes_round_a_ring_or_up_and_down_a_tree() -> None:
    ring = Group(size=4, bytes_per_second=10, ring_seconds=3, tree_seconds=5)
    tree = Group(size=4, bytes_per_second=10, ring_seconds=30, tree_seconds=5)
    assert half_ring(ring, 40) == 40 * 3 / 4 / 10 + 3
    assert all_reduce(ring, 40) == 2 * half_ring(ring, 40)
    assert all_reduce(tree, 40) == 2 * 40 * 3 / 4 / 10 + 2 * 5
    assert half_ring(tree, 40) == 40 * 3 / 4 / 10 + 30  # no tree of it is known


def test_a_collective_of_devices_starts_once_and_one_of_a_hosts_ranks_at_once() -> None:
    group = Group(size=4, bytes_per_second=10, ring_seconds=3, start_seconds=7)
    assert half_ring(group, 40) == 40 * 3 / 4 / 10 + 3 + 7
    assert all_reduce(replace(group, tree_seconds=5), 40) == 2 * (40 * 3 / 4 / 10 + 3) + 7
    assert group_along(replace(HARDWARE, compute_units=108), 8, 1).start_seconds == START_SECONDS
    assert group_along(HARDWARE, 8, 1).start_seconds == 0.0


@pytest.mark.parametrize(("size", "units", "seconds"), [(8, 108, 7), (32, 108, 7 + 2 * 100), (2, 108, 1), (8, 1, 3)])
def test_a_tree_of_nodes_has_a_chain_of_devices_in_each_and_a_host_a_tree(size: int, units: int, seconds: int) -> None:
    assert group_along(replace(HARDWARE, compute_units=units), size, 1).tree_seconds == seconds


@given(st.integers(2, 512), st.sampled_from([1, 2, 4, 8, 16]), st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_bytes_take_longer_and_an_all_reduce_no_longer_than_both_halves(
    size: int, stride: int, one: float, other: float
) -> None:
    group, (less, more) = group_along(HARDWARE, size, stride), sorted((one, other))
    assert all_reduce(group, less) <= all_reduce(group, more)
    assert all_reduce(group, less) <= 2 * half_ring(group, less) * (1 + 1e-12)


def test_tensor_ranks_are_neighbours_and_data_ranks_are_as_far_apart_as_tensor_ranks_are_many() -> None:
    strategy = Strategy(tp_size=4, dp_size=4)
    assert tensor_group(HARDWARE, strategy) == group_along(HARDWARE, 4, 1)
    assert data_group(HARDWARE, strategy) == group_along(HARDWARE, 4, 4)


@pytest.mark.parametrize(
    ("size", "stride", "copies", "seconds"),
    [
        pytest.param(1, 1, 8, 0, id="experts on one rank"),
        pytest.param(8, 1, 2, 800 * 2 * 7 / 8 / 100 + 2, id="inside a node: each copy but those that stay"),
        pytest.param(8, 8, 1, 800 * 1 * 7 / 8 / 10 + 200, id="one expert, one of eight nodes"),
        pytest.param(2, 8, 4, 800 * 2 * (1 - 1 / 16) / 2 / 10 + 200, id="four experts: hardly a node is left out"),
        pytest.param(16, 1, 1, 800 * 1 / 2 / 10 + 200, id="two whole nodes: half of the tokens leave"),
        pytest.param(12, 1, 1, 800 * 1 / 2 / 10 + 200, id="a node and a half is two nodes"),
    ],
)
def test_a_token_goes_once_to_each_node_of_its_experts(size: int, stride: int, copies: int, seconds: float) -> None:
    assert expert_exchange(HARDWARE, size, stride, 800, copies) == pytest.approx(seconds)


def test_a_token_that_goes_to_each_expert_by_itself_is_sent_as_often() -> None:
    inside, outside = (800 * 4 * share for share in (7 / 16, 8 / 16))  # of 16 ranks on two nodes
    node, network = HARDWARE.node, HARDWARE.network
    wanted = max(inside / node.bytes_per_second, outside / network.bytes_per_second) + 2 * network.hop_seconds
    assert expert_exchange(HARDWARE, 16, 1, 800, 4, once_a_node=False) == pytest.approx(wanted)


def test_an_exchange_has_its_own_rate_inside_a_node() -> None:
    slow = replace(HARDWARE, node=replace(HARDWARE.node, exchange_bytes_per_second=50.0))
    assert expert_exchange(slow, 8, 1, 800, 2) == pytest.approx(800 * 2 * 7 / 8 / 50 + 2)


@pytest.mark.parametrize(
    ("stride", "seconds"),
    [
        pytest.param(1, 500 / 100 + 1, id="the next rank"),
        pytest.param(7, 500 / 100 + 1, id="the last of the node"),
        pytest.param(8, 500 / 10 + 100, id="a node away"),
        pytest.param(64, 500 / 10 + 100, id="far away"),
    ],
)
def test_a_message_leaves_the_node_where_a_stage_fills_it(stride: int, seconds: float) -> None:
    assert message(HARDWARE, stride, 500) == seconds


@pytest.mark.parametrize(
    ("tensor", "data", "expert", "copies"),
    [(1, 8, 1, 8), (1, 8, 8, 1), (1, 8, 4, 2), (2, 8, 4, 4), (4, 2, 4, 2), (2, 2, 8, 1)],
)
def test_an_expert_has_a_copy_for_each_group_of_ranks_that_hold_all(tensor, data, expert, copies) -> None:
    assert expert_ranks(Strategy(tp_size=tensor, dp_size=data, ep_size=expert)) == copies


def test_ranks_with_copies_of_an_expert_lie_on_other_nodes_where_a_node_holds_all() -> None:
    assert expert_group(HARDWARE, Strategy(dp_size=16, ep_size=8)) == group_along(HARDWARE, 2, 8)
    shared = Strategy(tp_size=4, dp_size=4, ep_size=4)
    assert expert_group(HARDWARE, shared) == data_group(HARDWARE, shared)


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [
        ("all_reduce", 2 * 800 * 0.75 / 100 + 2 * 2),
        ("all_gather", 800 * 0.75 / 100 + 3),
        ("reduce_scatter", 800 * 0.75 / 100 + 3),
        ("all_to_all", 800 * 0.75 / 100 + 2),
        ("send", 800 / 100 + 1),
    ],
)
def test_a_collective_takes_the_time_of_its_pattern(operation: str, seconds: float) -> None:
    ranks = [1, 3] if operation == "send" else [0, 1, 2, 3]
    assert collective(HARDWARE, operation, ranks, 800) == pytest.approx(seconds)
    assert collective(HARDWARE, operation, [0], 800) == 0


def test_ranks_of_different_nodes_meet_over_the_network() -> None:
    assert collective(HARDWARE, "send", [0, 8], 800) == 800 / 10 + 100
    assert collective(HARDWARE, "all_gather", [0, 8], 800) == 800 / 2 / 10 + 200
