"""New weights are gathered in the order in which a forward pass needs them, and each layer waits for its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.deepspeed.overlap import AwaitedWeights


class Travelling:
    """The groups of an optimizer, whose weights are all on their way."""

    def __init__(self, *groups: Iterable[nn.Parameter]) -> None:
        self.bf16_groups = [list(group) for group in groups]
        self.arrived: list[int] = []

    def await_weights(self, groups: Iterable[int]) -> None:
        self.arrived += [group for group in groups if group not in self.arrived]


def seen_by(calls: list[Callable[[Tensor], Tensor]], optimizer: Travelling) -> list[list[int]]:
    """Which groups have arrived at the begin of a step, and when each layer runs."""
    weights, seen = AwaitedWeights(optimizer, [list(enumerate(calls))]), []  # type: ignore[arg-type]
    optimizer.await_weights(weights.before_layers)
    seen.append(list(optimizer.arrived))
    x = torch.ones(2, 2)
    for call in calls:
        if isinstance(call, nn.Module):
            call.register_forward_pre_hook(lambda *_: seen.append(list(optimizer.arrived)))
        else:
            seen.append(list(optimizer.arrived))
        x = call(x)
    return seen


@pytest.fixture
def layers() -> list[nn.Linear]:
    return [nn.Linear(2, 2) for _ in range(4)]


def test_each_layer_waits_for_its_own_weights_when_it_runs(layers: list[nn.Linear]) -> None:
    a, b, c, _ = layers
    norms = [layer.bias for layer in (b, c)]  # a group of several layers is there for the first
    optimizer = Travelling([c.weight], norms, [b.weight], a.parameters())
    assert seen_by([a, b, c], optimizer) == [[], [3], [3, 1, 2], [3, 1, 2, 0]]


def test_a_tied_weight_is_there_for_its_first_layer_and_an_unknown_one_at_the_begin(layers: list[nn.Linear]) -> None:
    a, b, c, elsewhere = layers
    c.weight = a.weight
    optimizer = Travelling(b.parameters(), [c.weight], elsewhere.parameters())
    assert seen_by([a, b, c], optimizer)[:2] == [[2], [2, 1]]


def test_a_function_may_read_any_weight_and_finds_all(layers: list[nn.Linear]) -> None:
    a, b, c, _ = layers

    def tied(module: nn.Linear, x: Tensor) -> Tensor:
        return x @ module.weight

    optimizer = Travelling(a.parameters(), b.parameters(), c.parameters())
    assert seen_by([a, partial(tied, c), b, c], optimizer)[:3] == [[], [0, 1, 2], [0, 1, 2]]
    assert seen_by([partial(tied, c), a, b], Travelling(a.parameters(), b.parameters()))[0] == [0, 1]


def test_hooks_of_others_see_new_weights(layers: list[nn.Linear]) -> None:
    first, optimizer = layers[0], Travelling(layers[0].parameters())
    seen: list[list[int]] = []
    first.register_forward_pre_hook(lambda *_: seen.append(list(optimizer.arrived)))
    AwaitedWeights(optimizer, [[(0, first)]])  # type: ignore[arg-type]
    first(torch.ones(2, 2))
    assert seen == [[0]]
