"""Seconds in which a host issues operations: its Python, and the library's way to a kernel.

A device works meanwhile, so only the longer of both counts. Where the device is the host's own processor, both add up,
and what DeepSpeed's Python does beside the operations counts too: it is given in operations, from the processor time of
steps of a model too narrow for its numbers to take time (transformers' llama, DeepSpeed 0.19.8, two ranks).
"""

from __future__ import annotations

from harness.planner.compute import PRODUCT_BYTES, Seconds
from harness.planner.hardware import Hardware
from harness.planner.shape import LayerShape
from harness.planner.workload import Strategy, Workload

# Operations that a host issues for a layer's forward, counted on a decoder of transformers; backward issues twice as
# many, one gradient for each input. A collective takes as long as a few of them.
OPERATIONS, COLLECTIVE_OPERATIONS = 50, 3
# On a host: what the harness and its engine do around a layer, both ways; of an all-reduce within a layer, with the
# autograd function around it; of a layer's recomputation beside its forward; of ZeRO-3's hooks on a layer's modules,
# both ways; of what a micro-batch takes beside its layers, both ways; and of a layer's part in an update.
HOST_LAYER, HOST_COLLECTIVE, HOST_RECOMPUTED, HOST_ZERO_3, HOST_MICRO_BATCH, HOST_UPDATE = 50, 23, 185, 900, 420, 70


def with_issue(
    hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, device: Seconds
) -> Seconds:
    """Return the seconds of a layer, of whose own work `device` has the seconds."""
    operations = _operations(workload, strategy, layer)
    if not hardware.is_host:
        issue = (operations + (2 * COLLECTIVE_OPERATIONS if strategy.tp_size > 1 else 0)) * hardware.dispatch_seconds
        return Seconds(max(device.forward, issue), max(device.backward, 2 * issue))
    calls = 0 if strategy.tp_size == 1 else 2 * (2 if strategy.sequence_parallel else 1)
    both = calls * HOST_COLLECTIVE + (HOST_LAYER + (HOST_ZERO_3 if strategy.zero_stage == 3 else 0)) / 2
    again = HOST_RECOMPUTED if strategy.recompute == "full" else 0
    once = hardware.dispatch_seconds
    return device.plus(Seconds((operations + both) * once, (2 * operations + both + again) * once))


def _operations(workload: Workload, strategy: Strategy, layer: LayerShape) -> int:
    """Return the operations that a host issues for a layer's forward.

    Routing takes as many again as a dense layer. Where experts are multiplied one by one, each takes two products, and
    in less than 16 bits two casts of their inputs.
    """
    if not layer.experts:
        return OPERATIONS
    each = 4 if PRODUCT_BYTES[workload.precision] < 2 else 2
    return 2 * OPERATIONS + (0 if workload.habits.grouped_experts else each * held_experts(strategy, layer))


def held_experts(strategy: Strategy, layer: LayerShape) -> int:
    """Return how many routed experts a rank holds."""
    return max(1, layer.experts // strategy.ep_size)


def micro_batch_issue(hardware: Hardware) -> float:
    """Return the seconds of a host's Python for a micro-batch on a stage, beside its layers."""
    return HOST_MICRO_BATCH * hardware.dispatch_seconds if hardware.is_host else 0.0


def update_issue(hardware: Hardware, layers: int) -> float:
    """Return the seconds of a host's Python for an update of so many layers."""
    return HOST_UPDATE * layers * hardware.dispatch_seconds if hardware.is_host else 0.0
