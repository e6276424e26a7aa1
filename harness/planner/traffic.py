"""Predict the seconds of collectives and messages.

In a ring, an all-reduce moves 2 (n - 1) / n of the bytes through each rank, and an all-gather or a reduce-scatter half
of that (Patarasuk and Yuan 2009; it defines NCCL's bus bandwidth). Each half takes n - 1 hops. A group that spans nodes
is one ring through all of them; its ranks in a node share the network adapters.

Only an all-reduce can use a tree of nodes instead, with a chain of ranks in each node; its hops grow with the logarithm
of the number of nodes (NCCL, src/graph/tuning.cc). So all-gathers over thousands of ranks are slow. Ranks that share a
host's memory also count as a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from harness.planner.hardware import Hardware
from harness.planner.workload import Strategy

START_SECONDS = 8.4e-6  # of a collective on GPUs: NCCL, src/graph/tuning.cc, baseLatencies of its Simple protocol


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate.

    Attributes:
        bytes_per_second: rate through each of them.
        ring_seconds: latency once around the ring; tree_seconds: latency up the tree.
        start_seconds: time to start a collective, besides its hops.
    """

    size: int
    bytes_per_second: float
    ring_seconds: float = 0.0
    tree_seconds: float = 0.0
    start_seconds: float = 0.0


def group_along(hardware: Hardware, size: int, stride: int) -> Group:
    """Return a group of `size` ranks that are `stride` ranks apart."""
    node, network = hardware.node, hardware.network
    in_node = max(1, min(size, hardware.node_size // stride))
    nodes = -(-size // in_node)
    is_inside = nodes == 1
    depth = ceil(log2(in_node)) if hardware.is_host else in_node - 1
    return Group(
        size=size,
        bytes_per_second=node.bytes_per_second
        if is_inside
        else min(node.bytes_per_second, in_node * network.bytes_per_second),
        ring_seconds=(size - nodes) * node.hop_seconds + (0 if is_inside else nodes * network.hop_seconds),
        start_seconds=0.0 if hardware.is_host else START_SECONDS,
        tree_seconds=depth * node.hop_seconds + ceil(log2(nodes)) * network.hop_seconds,
    )


def tensor_group(hardware: Hardware, strategy: Strategy) -> Group:
    """Return the tensor-parallel group: neighbouring ranks."""
    return group_along(hardware, strategy.tp_size, 1)


def expert_ranks(strategy: Strategy) -> int:
    """Return how many ranks hold copies of one expert, or of one part of it."""
    return max(1, strategy.tp_size * strategy.dp_size // max(strategy.ep_size, strategy.tp_size))


def data_group(hardware: Hardware, strategy: Strategy) -> Group:
    """Return the ranks that hold copies of one part of the model."""
    return group_along(hardware, strategy.dp_size, strategy.tp_size)


def expert_group(hardware: Hardware, strategy: Strategy) -> Group:
    """Return the ranks that hold copies of one expert."""
    return group_along(hardware, expert_ranks(strategy), max(strategy.ep_size, strategy.tp_size))


def half_ring(group: Group, size_bytes: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter; `size_bytes` is the size of the whole tensor."""
    if group.size == 1:
        return 0.0
    moved = size_bytes * (group.size - 1) / group.size / group.bytes_per_second
    return moved + group.ring_seconds + group.start_seconds


def all_reduce(group: Group, size_bytes: float) -> float:
    """Return the seconds of an all-reduce of `size_bytes`: twice around a ring, or up and down a tree."""
    if group.size == 1:
        return 0.0
    moved = 2 * size_bytes * (group.size - 1) / group.size / group.bytes_per_second
    return moved + 2 * min(group.ring_seconds, group.tree_seconds) + group.start_seconds


def expert_exchange(
    hardware: Hardware, size: int, stride: int, token_bytes: float, copies: float, *, once_a_node: bool = True
) -> float:
    """Return the seconds in which each of `size` ranks sends every token to the ranks of its `copies` experts.

    With `once_a_node` a token is sent once to each node with one of its experts, and copied inside that node (DeepEP);
    otherwise it is sent once for each expert.
    """
    if size == 1:
        return 0.0
    in_node = max(1, min(size, hardware.node_size // stride))
    nodes = -(-size // in_node)
    reached = nodes * (1 - (1 - 1 / nodes) ** copies) if once_a_node else copies
    rate = hardware.node.exchange_bytes_per_second or hardware.node.bytes_per_second
    inside = token_bytes * copies * (in_node - 1) / (in_node if once_a_node else size) / rate
    outside = token_bytes * reached * (nodes - 1) / nodes / hardware.network.bytes_per_second
    hop = hardware.node.hop_seconds if nodes == 1 else hardware.network.hop_seconds
    return max(inside, outside) + 2 * hop


def message(hardware: Hardware, stride: int, size_bytes: float) -> float:
    """Return the seconds of a message to the rank `stride` ranks away.

    If a stage fills whole nodes, its neighbour is on another node.
    """
    link = hardware.node if stride < hardware.node_size else hardware.network
    return size_bytes / link.bytes_per_second + link.hop_seconds


def collective(hardware: Hardware, operation: str, ranks: Sequence[int], size_bytes: float) -> float:
    """Return the seconds of one collective, or of a send or recv, between global ranks in ascending order.

    Ranks that are not equally far apart count as if all were as far apart as the first two.

    Args:
        operation: torch.distributed's name, as `all_reduce`.
        size_bytes: size of the tensor of an all-reduce, broadcast or send, of the output of an all-gather or gather, of
            the input of a reduce-scatter, scatter or all-to-all.
    """
    if len(ranks) < 2:
        return 0.0
    stride = ranks[1] - ranks[0]
    if operation in ("send", "recv"):
        return message(hardware, stride, size_bytes)
    group = group_along(hardware, len(ranks), stride)
    if operation in ("all_reduce", "barrier"):
        return all_reduce(group, size_bytes)
    if operation == "all_to_all":
        return expert_exchange(hardware, len(ranks), stride, size_bytes, 1, once_a_node=False) + group.start_seconds
    return half_ring(group, size_bytes)
