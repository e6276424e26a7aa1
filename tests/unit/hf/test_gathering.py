"""Which modules ZeRO-3 must gather as one: those whose calls depend on values, and no more than those."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.hf.forward.outer_forward import OuterForward
from harness.hf.layers.facts import leaves_of, leaves_of_sequence
from harness.hf.skeleton import build_skeleton
from harness.verify.tiny_copy import tiny_config
from tests.support.experts import WIDTH, ByRow, Listed, ReadByParent, Residual, Stacked


class ReadOutside(nn.Module):
    """Reads a parameter of the experts, which may then be no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.experts.weight.sum()


class CalledTwice(nn.Module):
    """Calls its experts twice, and a linear layer twice: the one depends on values, the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Listed()
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.inner(self.plain(self.inner(x))))


class Plain(nn.Module):
    """Reads a weight of a module that it also calls, twice; nothing depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.linear(self.linear(x)), self.linear.weight)


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        (Stacked, {"layer.experts"}),
        (ReadByParent, {"layer.experts"}),
        (Listed, {"layer"}),
        (ByRow, {"layer"}),
        (ReadOutside, {"layer"}),
        (CalledTwice, {"layer"}),
        (Plain, set()),
    ],
)
def test_the_smallest_module_that_may_be_a_leaf_is_chosen(kind: type[nn.Module], leaves: set[str]) -> None:
    with torch.device("meta"):
        layer = Residual(kind())
    before = dict(layer.named_parameters())
    assert leaves_of(layer, lambda module: module(torch.empty(2, 3, WIDTH, device="meta"))) == leaves
    assert dict(layer.named_parameters()).keys() == before.keys()
    assert all(not hasattr(module.forward, "func") for module in layer.modules())  # the layer itself is untouched


def test_leaves_of_a_users_own_layers_are_found_under_their_index() -> None:
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Residual(Listed()), Stacked()])
    first, second, third = layers
    calls = [first, torch.tanh, second, partial(lambda module, x: module(x), third)]
    assert leaves_of_sequence(layers, calls, torch.randn(2, 3, WIDTH)) == ["1.layer", "2.experts"]


@pytest.mark.parametrize(
    ("family", "leaves"),
    [("llama", set()), ("olmoe", {"mlp.experts"}), ("jetmoe", {"mlp.router", "self_attention.experts.router"})],
)
def test_leaves_of_a_decoder_are_its_experts(family: str, leaves: set[str]) -> None:
    outer = OuterForward(build_skeleton(tiny_config(family)), torch.device("cpu"))
    assert outer.facts.zero3_leaves(1) == leaves
