"""Progress by layer, for engines that run no pipeline instructions (ZeRO-2, ZeRO-3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.deepspeed.pipeline import LayerCall
from harness.resilience.watch.activity import beat


def announce_layers(calls: Sequence[LayerCall]) -> None:
    """Have each layer show when its forward and its backward begin."""
    for index, call in enumerate(calls):
        if isinstance(call, nn.Module):
            call.register_forward_pre_hook(partial(_forward, f"forward of layer {index}"))
            call.register_forward_hook(partial(_backward, f"backward of layer {index}"))


def _forward(doing: str, _layer: nn.Module, _inputs: object) -> None:
    beat(doing)


def _backward(doing: str, _layer: nn.Module, _inputs: object, output: object) -> None:
    """Show the backward of a layer as soon as the gradient of its output is there."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _gradient: beat(doing))
            return
