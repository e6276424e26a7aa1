"""Runs of neighbouring layers, of which activation checkpointing stores what goes in and computes the rest again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

from torch import Tensor, nn

from harness.deepspeed.pipeline import LayerCall
from harness.parallel.draws import DrawKey
from harness.parallel.values import Value


def is_recomputed(layers: Sequence[LayerCall]) -> bool:
    """Whether activation checkpointing applies to layers: by their own `recompute`, else if they have parameters."""
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    return any(getattr(module, "recompute", any(True for _ in module.parameters())) for module in modules)


def shared_parameters(layers: Iterable[LayerCall]) -> set[nn.Parameter]:
    """Return the parameters that several layers hold."""
    counts = Counter(parameter for layer in layers for parameter in _parameters(layer))
    return {parameter for parameter, count in counts.items() if count > 1}


def split_into_blocks(
    layers: Sequence[LayerCall], interval: int, shared: set[nn.Parameter]
) -> Iterator[tuple[list[tuple[int, LayerCall]], bool]]:
    """Yield runs of layers with their indices, and whether each run is recomputed.

    A run is up to `interval` neighbours that may be recomputed, or one layer that may not.

    Layers that share parameters are not: each recomputed block has a backward of its own, and ZeRO-2 and ZeRO-3 take
    a parameter's gradient but once.
    """
    block: list[tuple[int, LayerCall]] = []
    for index, layer in enumerate(layers):
        if interval > 0 and is_recomputed([layer]) and shared.isdisjoint(_parameters(layer)):
            block.append((index, layer))
            if len(block) < interval:
                continue
            yield block, True
        else:
            if block:
                yield block, True
            yield [(index, layer)], False
        block = []
    if block:
        yield block, True


def _parameters(layer: LayerCall) -> Iterable[nn.Parameter]:
    return layer.parameters() if isinstance(layer, nn.Module) else ()


def run_block(block: Sequence[tuple[int, LayerCall]], key: DrawKey | None, *given: Tensor) -> Value:
    """Return the output of layers given with their indices; what they draw depends on `key` alone."""
    inputs: Value = given if len(given) > 1 else given[0]
    for index, layer in block:
        with nullcontext() if key is None else key.layer(index):
            inputs = layer(inputs)
    return inputs
