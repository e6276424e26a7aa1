"""A model cut into pipeline layers in one process, and its layers called one after the other."""

from __future__ import annotations

from typing import Any

import torch

from harness.hf.causal import CausalModel, assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.parallel.pipeline.staged_module import BuiltLayers, build_layers


def prepare(source: ModelSource, tensor: TensorParallel | None = None, **options: Any) -> CausalModel:
    """Return the layers of a model in float32 on the CPU, from seed 0 unless `options` say otherwise."""
    place: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    return assemble(source, tensor=tensor or TensorParallel(), finish=lambda layer: None, **{**place, **options})


def build(causal: CausalModel, start: int = 0, stop: int | None = None) -> BuiltLayers:
    """Build the layers of a stage, all by default, to be evaluated."""
    built = build_layers(causal.layers, start, len(causal.layers) if stop is None else stop, seed=0)
    for module in built.modules.values():
        module.eval()
    return built


def run(built: BuiltLayers, value: torch.Tensor) -> torch.Tensor:
    """Call the layers on ids [batch, sequence] or a hidden state; return what the last one gives."""
    for layer in built.calls:
        value = layer(value)
    return value
