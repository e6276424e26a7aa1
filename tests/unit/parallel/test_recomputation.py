"""Which neighbouring layers are recomputed together, and generators that leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.parallel.generators import own_generators, seed_of
from harness.parallel.pipeline.staged_module import is_recomputed, run_block, shared_parameters, split_into_blocks

KINDS = {"p": lambda: nn.Linear(2, 2), "-": nn.ReLU, "f": lambda: torch.relu}


class Marked(nn.Linear):
    """A layer that says itself whether it is recomputed."""

    recompute = False


def blocks_of(kinds: str, interval: int) -> str:
    """The blocks of layers with parameters (p), without (-) and of functions (f): recomputed ones in brackets."""
    layers: list[Any] = [KINDS[kind]() for kind in kinds]
    found = ""
    for block, recomputed in split_into_blocks(layers, interval, set()):
        names = "".join(kinds[index] for index, _ in block)
        assert all(layers[index] is layer for index, layer in block)
        found += f"({names})" if recomputed else names
    return found


@pytest.mark.parametrize(
    ("kinds", "interval", "blocks"),
    [
        ("", 1, ""),
        ("ppp", 0, "ppp"),
        ("ppp", 1, "(p)(p)(p)"),
        ("ppppp", 2, "(pp)(pp)(p)"),
        ("pp-pp", 3, "(pp)-(pp)"),
        ("fpp", 4, "f(pp)"),
        ("--", 1, "--"),
        ("pp", 99, "(pp)"),
    ],
)
def test_neighbours_with_parameters_are_recomputed_together(kinds: str, interval: int, blocks: str) -> None:
    assert blocks_of(kinds, interval) == blocks


@given(st.text("pf-", max_size=12), st.integers(0, 5))
def test_every_layer_is_in_one_block_in_its_order(kinds: str, interval: int) -> None:
    found = blocks_of(kinds, interval)
    assert found.replace("(", "").replace(")", "") == kinds
    assert all(
        0 < len(block) <= interval
        for block in found.replace("(", " ").replace(")", " ").split()
        if "p" in block and interval
    )


def test_a_layer_may_say_that_it_is_not_recomputed() -> None:
    layers = [Marked(2, 2), nn.Linear(2, 2)]
    assert [is_recomputed([layer]) for layer in layers] == [False, True]
    assert [recomputed for _, recomputed in split_into_blocks(layers, 2, set())] == [False, True]


def test_layers_that_share_a_parameter_are_not_recomputed() -> None:
    table, between, head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    head.weight = table.weight
    shared = shared_parameters([table, torch.relu, between, head])
    assert shared == {table.weight}
    found = list(split_into_blocks([table, between, head], 3, shared))
    assert [([index for index, _ in block], again) for block, again in found] == [
        ([0], False),
        ([1], True),
        ([2], False),
    ]


def test_a_parameter_that_one_layer_holds_twice_is_not_shared() -> None:
    twice = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twice[1].weight = twice[0].weight
    assert shared_parameters([twice, nn.Linear(2, 2)]) == set()


def test_a_block_hands_on_one_value_or_several() -> None:
    double, summed = (lambda x: x * 2), (lambda pair: pair[0] + pair[1])
    one = torch.tensor(3.0)
    assert run_block([(0, double), (1, double)], None, one) == 12
    assert run_block([(0, summed), (1, double)], None, one, one) == 12
    assert run_block([], None, one) is one


@given(st.lists(st.one_of(st.integers(), st.sampled_from(["", "layer", "é"])), max_size=4))
def test_a_seed_depends_on_every_part_of_its_key_and_on_nothing_else(key: list[Any]) -> None:
    seed = seed_of(*key)
    assert 0 <= seed < 2**63
    assert seed == seed_of(*map(str, key))
    assert seed != seed_of(*key, 0) and seed != seed_of(0, *key)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert seed_of("layer", 3) == 4079794342524634171  # blake2b of the words, without its last bit


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_what_is_drawn_within_leaves_no_trace_even_after_an_error() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    wanted = draws()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    with own_generators(1):
        first = draws()
    with pytest.raises(KeyError), own_generators(2**63 - 1):
        draws()
        raise KeyError
    assert draws() == wanted
    with own_generators(1), own_generators(1):
        assert draws() == first
