"""Progress of a model without pipeline instructions: each layer's forward and backward is shown, in its order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.resilience.process.records import HERE
from harness.resilience.watch.activity import ACTIVITY
from harness.resilience.watch.layers import announce_layers


def test_each_layer_shows_its_forward_and_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(ACTIVITY, "publish", lambda: shown.append(HERE.doing))
    layers = [nn.Linear(2, 2), torch.relu, nn.Linear(2, 1)]  # a function has no hooks
    announce_layers(layers)
    value = torch.ones(1, 2)
    for layer in layers:
        value = layer(value)
    value.sum().backward()
    assert shown == [f"{doing} of layer {index}" for doing, index in (("forward", 0), ("forward", 2))] + [
        f"backward of layer {index}" for index in (2, 0)
    ]
    shown.clear()
    with torch.no_grad():
        layers[0](torch.ones(1, 2))
    assert shown == ["forward of layer 0"]
