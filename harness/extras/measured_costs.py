"""The costs of layers by timing them (`pipeline.partition: measured`)."""

from __future__ import annotations

import copy
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from harness.deepspeed.pipeline import LayerCall
from harness.parallel.pipeline.staged_module import build_layers
from harness.parallel.values import Value
from harness.training.engine.losses import Loss, targets
from harness.training.engine.spec import EngineSpec
from harness.training.prepare.trainable import TrainableModel

ROUNDS = 3


def measured_costs(
    trainable: TrainableModel, spec: EngineSpec, device: torch.device, inputs: Value, labels: Value
) -> list[float]:
    """Time forward and backward of each layer on one micro-batch; return the mean seconds over all ranks.

    Layers are built one at a time and discarded. Among layers of equal class, size and input shape, only the first is
    timed. All ranks time the same layers in the same order, because tensor-parallel layers run collectives.
    """
    known: dict[tuple[object, ...], float] = {}
    seconds = []
    value = tree_map(partial(_place, device=device, dtype=spec.dtype), inputs)
    for index, name in enumerate(trainable.names):
        kind = (name, trainable.parameters[index], tuple(leaf.shape for leaf in tree_leaves(value)))
        layer = build_layers(trainable.layers, index, index + 1, spec.args.seed).calls[0]
        if isinstance(trainable.layers[index], nn.Module):
            layer = copy.deepcopy(layer)  # leave the user's module unchanged
        if isinstance(layer, nn.Module):
            layer = layer.to(device, spec.dtype)
        loss = trainable.loss if index == len(trainable.layers) - 1 else None
        if kind not in known or loss is not None:
            known[kind] = _time_layer(layer, value, loss, labels, device)
        seconds.append(known[kind])
        with torch.no_grad():  # the input of the next layer
            value = layer(value)
    # Ranks must agree on the costs, as each computes the boundaries itself.
    total = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def _time_layer(layer: LayerCall, value: Value, loss: Loss | None, labels: Value, device: torch.device) -> float:
    """Return the seconds of the fastest round after a warm-up."""
    times = []
    wanted = tree_map(lambda label: label.to(device), labels)
    for _ in range(ROUNDS):
        given = tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), value)
        _wait(device)
        start = time.perf_counter()
        output = layer(given)
        results = [output] if loss is None else [loss(output, targets(wanted, 1.0, len(tree_leaves(wanted)[0])))]
        total = sum(leaf.float().sum() for leaf in tree_leaves(results))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _place(leaf: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
