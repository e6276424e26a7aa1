"""Which layers stand on which stage: chosen from what layers cost, and told to the user."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.parallel.partition import stage_boundaries
from harness.parallel.staged import Layer, build_layers
from harness.topology.groups import Groups
from harness.training.build import Setting
from harness.training.losses import targets
from harness.training.subject import Subject

ROUNDS = 3


@dataclass(frozen=True)
class StageLine:
    """One stage as the user sees it.

    Attributes:
        ranks: global ranks that hold it.
        first, last: indices of its pipeline layers.
        kinds: class name -> number of layers.
        parameters: of one rank of the stage, as it holds them.
    """

    stage: int
    ranks: list[int]
    first: int
    last: int
    kinds: dict[str, int]
    parameters: int

    def __str__(self) -> str:
        kinds = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in self.kinds.items())
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]}-{self.ranks[-1]}"
        return (
            f"stage {self.stage} on {ranks}: layers {self.first}-{self.last} ({kinds}), "
            f"{self.parameters:,} parameters a rank"
        )


def choose_boundaries(subject: Subject, setting: Setting, sample: Any) -> list[int]:
    """The stage boundaries by the config's `pipeline.partition`; all ranks call it and get the same.

    Args:
        sample: inputs and labels of one micro-batch, for `measured`; None if there is no training data.
    """
    stages = setting.groups.layout.pipeline
    if stages == 1:
        return [0, len(subject.layers)]
    method = setting.resolved.partition
    costs = subject.costs
    if method == "measured" and sample is not None:
        costs = measured_costs(subject, setting, *sample)
    return stage_boundaries(method, stages, costs=costs, parameters=subject.parameters, names=subject.names)


def stage_lines(subject: Subject, boundaries: Sequence[int], module: nn.Module, groups: Groups) -> list[StageLine]:
    """One line a stage; all ranks call it."""
    held = torch.zeros(groups.layout.pipeline, dtype=torch.float64)
    held[groups.coordinate.stage] = sum(_size(parameter) for parameter in module.parameters())
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, (groups.coordinate.stage, int(held.sum())))
    largest = {stage: max(size for s, size in sizes if s == stage) for stage, _ in sizes}
    return [
        StageLine(
            stage=stage,
            ranks=groups.layout.stage_ranks(stage),
            first=start,
            last=stop - 1,
            kinds=dict(Counter(subject.names[start:stop])),
            parameters=largest[stage],
        )
        for stage, (start, stop) in enumerate(pairwise(boundaries))
    ]


def measured_costs(subject: Subject, setting: Setting, inputs: Any, labels: Any) -> list[float]:
    """Seconds of forward and backward of each layer on one micro-batch; the mean over all ranks.

    Layers are built one at a time, and only one of each kind and size: the others cost the same.
    """
    known: dict[tuple[str, int], float] = {}
    seconds = []
    value = _to(inputs, setting.device)
    for index in range(len(subject.layers)):
        kind = (subject.names[index], subject.parameters[index])
        if kind not in known:
            loss = subject.loss if index == len(subject.layers) - 1 else None
            module = build_layers(subject.layers, index, index + 1, setting.args.seed).calls[0]
            known[kind], value = _time_layer(module, value, loss, labels, setting)
        seconds.append(known[kind])
    total = torch.tensor(seconds, dtype=torch.float64, device=setting.device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def _time_layer(layer: Layer, value: Any, loss: Any, labels: Any, setting: Setting) -> tuple[float, Any]:
    """Seconds of the fastest of some rounds (the first warms up), and the layer's output."""
    times = []
    for _ in range(ROUNDS):
        given = value.detach().requires_grad_(value.is_floating_point())
        _wait(setting.device)
        start = time.perf_counter()
        output = layer(given)
        result = output if loss is None else loss(output, targets(_to(labels, setting.device), 1.0, len(labels)))
        result.float().sum().backward()
        _wait(setting.device)
        times.append(time.perf_counter() - start)
    return min(times[1:]), output.detach()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else tuple(item.to(device) for item in value)


def _size(parameter: nn.Parameter) -> int:
    """Elements that this rank holds: under ZeRO-3 its part."""
    partition = getattr(parameter, "ds_tensor", None)
    return parameter.numel() if partition is None else partition.numel()
