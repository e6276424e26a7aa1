"""Seconds of collectives and messages.

A ring moves 2 (n - 1) / n of the bytes through each rank for an all-reduce, half of that for an all-gather or a
reduce-scatter (Patarasuk and Yuan 2009; NCCL's bus bandwidth is defined by it), and takes n - 1 hops for each half. A
group that spans nodes is one ring through all of them, and its members in a node share their adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from harness.planner.hardware import Hardware
from harness.planner.workload import Strategy


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate: how many, the bytes a second through each, and seconds a hop."""

    size: int
    bytes_per_second: float
    hop_seconds: float


def group_along(hardware: Hardware, size: int, stride: int) -> Group:
    """Return a group of `size` ranks that are `stride` ranks apart."""
    in_node = max(1, min(size, hardware.node_size // stride))
    if in_node >= size:
        return Group(size=size, bytes_per_second=hardware.node.bytes_per_second, hop_seconds=hardware.node.hop_seconds)
    rate = min(hardware.node.bytes_per_second, in_node * hardware.network.bytes_per_second)
    return Group(size=size, bytes_per_second=rate, hop_seconds=hardware.network.hop_seconds)


def tensor_group(hardware: Hardware, strategy: Strategy) -> Group:
    """Return the tensor-parallel group: neighbouring ranks."""
    return group_along(hardware, strategy.tensor, 1)


def data_group(hardware: Hardware, strategy: Strategy) -> Group:
    """Return the ranks that hold copies of one part of the model, context-parallel ranks among them."""
    return group_along(hardware, strategy.data * strategy.context, strategy.tensor)


def half_ring(group: Group, size_bytes: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size_bytes` in all.

    Hops are those of a ring in a small group and of a tree in a large one, as NCCL chooses.
    """
    if group.size == 1:
        return 0.0
    hops = min(group.size - 1, 2 * ceil(log2(group.size)))
    return size_bytes * (group.size - 1) / group.size / group.bytes_per_second + hops * group.hop_seconds


def all_reduce(group: Group, size_bytes: float) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * half_ring(group, size_bytes)


def expert_exchange(hardware: Hardware, size: int, stride: int, token_bytes: float, copies: int) -> float:
    """Return the seconds in which each of `size` ranks sends every token to the ranks of its `copies` experts.

    A token goes once to each node that holds one of them, and is copied on inside it.
    """
    if size == 1:
        return 0.0
    in_node = max(1, min(size, hardware.node_size // stride))
    nodes = max(1, size // in_node)
    reached = nodes * (1 - (1 - 1 / nodes) ** copies)
    inside = token_bytes * copies * (in_node - 1) / in_node / hardware.node.bytes_per_second
    outside = token_bytes * reached * (nodes - 1) / nodes / hardware.network.bytes_per_second
    hop = hardware.node.hop_seconds if nodes == 1 else hardware.network.hop_seconds
    return max(inside, outside) + 2 * hop


def message(hardware: Hardware, stride: int, size_bytes: float) -> float:
    """Return the seconds of a message to the rank `stride` ranks away.

    Where a stage fills whole nodes its neighbour is on another one.
    """
    link = hardware.node if stride < hardware.node_size else hardware.network
    return size_bytes / link.bytes_per_second + link.hop_seconds
