"""Whole attention heads for every rank, widths that are no heads', and what is said where a rank would have nothing."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig

from harness.config.model.sharding import Heads
from harness.errors import UserError
from harness.parallel.plans.heads import Attention, attention_at, attention_below, blocks_of, deal, heads_of

GROUPED = Heads(query=8, key_value=2)
CONFIG = LlamaConfig(num_attention_heads=12, num_key_value_heads=3, hidden_size=96)


def module(**attributes: Any) -> nn.Module:
    made = nn.Identity()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("attributes", "heads"),
    [
        pytest.param({"num_heads": 8}, (8, 3), id="its own number, keys as the config says"),
        pytest.param({"n_head": 8, "num_kv_heads": 2}, (8, 2), id="both its own"),
        pytest.param({"num_attention_heads": 8, "num_key_value_groups": 4}, (8, 2), id="by its groups"),
        pytest.param({"num_heads": 8, "num_key_value_groups": 3}, (8, 3), id="groups that do not divide are no groups"),
        pytest.param({"head_dim": 8}, (12, 3), id="it has heads; the config says how many"),
        pytest.param({"num_key_value_groups": 4}, (12, 3), id="of the config's heads so many are a group"),
        pytest.param({"num_heads": None, "head_size": 8}, (12, 3), id="a number that is none"),
        pytest.param({"num_heads": nn.Linear(1, 1)}, None, id="a layer of that name"),
        pytest.param({"hidden_size": 96}, None, id="no attention"),
    ],
)
def test_heads_are_those_that_a_module_says_or_its_config(attributes: dict[str, Any], heads: Any) -> None:
    found = heads_of(module(**attributes), CONFIG)
    assert (found and (found.query, found.key_value)) == heads


def test_a_layer_may_have_heads_of_its_own() -> None:
    layers = [SimpleNamespace(num_attention_heads=4, num_key_value_heads=2), SimpleNamespace(num_attention_heads=6)]
    config: Any = SimpleNamespace(num_attention_heads=12, num_key_value_heads=3, per_layer_config=layers)
    asked = [heads_of(module(head_dim=8, layer_idx=index), config) for index in (0, 1, 2, -1)]
    assert asked == [
        Heads(query=4, key_value=2),
        Heads(query=6, key_value=6),
        Heads(query=12, key_value=3),  # of an encoder, say: not among the layers
        Heads(query=12, key_value=3),
    ]


@pytest.mark.parametrize(
    ("width", "size", "options", "ranges"),
    [
        pytest.param(6, 3, {}, [(0, 2), (2, 4), (4, 6)], id="equal"),
        pytest.param(7, 3, {}, [(0, 3), (3, 5), (5, 7)], id="the first has one more"),
        pytest.param(8, 3, {"unit": 2}, [(0, 4), (4, 6), (6, 8)], id="by units"),
        pytest.param(32, 2, {"heads": GROUPED}, [(0, 16), (16, 32)], id="queries of whole groups"),
        pytest.param(32, 3, {"heads": GROUPED}, [(0, 8), (8, 16), (16, 32)], id="queries of two heads on three ranks"),
        pytest.param(
            8, 4, {"heads": GROUPED, "key_values": {8}}, [(0, 4), (0, 4), (4, 8), (4, 8)], id="keys on two ranks each"
        ),
        pytest.param(8, 2, {"heads": GROUPED}, [(0, 4), (4, 8)], id="keys of one head each"),
        pytest.param(9, 2, {"heads": GROUPED}, [(0, 5), (5, 9)], id="no width of heads"),
        pytest.param(12, 3, {"heads": Heads(query=6, key_value=3)}, [(0, 4), (4, 8), (8, 12)], id="two queries a head"),
        pytest.param(10, 1, {"heads": Heads(query=3, key_value=2)}, [(0, 10)], id="a rank alone has all"),
    ],
)
def test_a_width_is_dealt_out(width: int, size: int, options: dict[str, Any], ranges: list[Any]) -> None:
    assert deal(width, size, "it", **options) == ranges


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_queries_are_dealt_out_once_and_their_keys_with_them(
    key_value: int, group: int, head_dim: int, size: int, unit: int
) -> None:
    heads = Heads(query=key_value * group, key_value=key_value)
    if size > heads.query:
        return
    queries = deal(heads.query * head_dim, size, "q", heads=heads)
    keys = deal(key_value * head_dim, size, "k", heads=heads, key_values={key_value * head_dim})
    assert (queries[0][0], queries[-1][1]) == (0, heads.query * head_dim)
    assert all(one[1] == other[0] for one, other in pairwise(queries))
    for (start, stop), (first, last) in zip(queries, keys, strict=True):
        assert start % head_dim == stop % head_dim == first % head_dim == last % head_dim == 0
        served = {query // group for query in range(start // head_dim, stop // head_dim)}
        assert served == set(range(first // head_dim, last // head_dim))
    shares = deal(size * unit, size, "any", unit=unit)
    assert shares == [(rank * unit, (rank + 1) * unit) for rank in range(size)]


@pytest.mark.parametrize(
    ("width", "size", "options", "told"),
    [
        pytest.param(3, 4, {}, "width 3 of it: use at most 3", id="wider than it"),
        pytest.param(8, 3, {"unit": 4}, "width 8, in units of 4, of it: use at most 2", id="too few units"),
        pytest.param(9, 2, {"unit": 4}, r"width 9, in units of 4, of it: use at most 1", id="a part of a unit"),
        pytest.param(
            32, 9, {"heads": GROUPED}, "8 attention heads and 2 key/value heads of it: use at most 8", id="heads"
        ),
        pytest.param(4, 2, {"heads": Heads(query=1, key_value=1)}, "1 attention head of it: use at most 1", id="one"),
        pytest.param(
            60,
            5,
            {"heads": Heads(query=6, key_value=4)},
            "6 attention heads and 4 key/value heads of it: use 1 or 2",
            id="odd",
        ),
    ],
)
def test_a_rank_without_a_share_is_told_with_the_sizes_that_fit(
    width: int, size: int, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=rf"^tensor_parallel\.autotp_size {size} does not fit the {told}$"):
        deal(width, size, "it", **options)


def test_blocks_share_the_heads_equally_or_not_at_all() -> None:
    assert blocks_of(GROUPED, 2, "it") == Heads(query=4, key_value=1)
    with pytest.raises(UserError, match="the heads of it are not 4 equal blocks"):
        blocks_of(GROUPED, 4, "it")


ATTENTION = Attention(module=None, heads=GROUPED, head_dims=frozenset({4}))
PLACES = {"model.layers.0.attn": ATTENTION, "model.layers.1.mixer.inner": ATTENTION}


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        pytest.param("model.layers.0.attn", True, id="the attention itself"),
        pytest.param("model.layers.0.attn.q_proj", True, id="a layer in it"),
        pytest.param("model.layers.1.mixer.out", False, id="a layer beside it, in one block"),
        pytest.param("model.layers.0.mlp.up_proj", None, id="another block of the layer"),
        pytest.param("model.layers.2.attn.q_proj", None, id="another layer"),
        pytest.param("lm_head", None, id="outside of the layers"),
    ],
)
def test_the_attention_of_a_layer_is_in_it_around_it_or_beside_it(name: str, inside: bool | None) -> None:
    found = attention_at(name, PLACES, 2)
    assert (found.inside if found else None) == inside


def test_an_attention_beside_a_layer_must_fit_the_ranks() -> None:
    assert attention_at("model.layers.1.mixer.out", PLACES, 8) is not None
    assert attention_at("model.layers.1.mixer.out", PLACES, 9) is None
    assert attention_at("model.layers.0.attn.q_proj", PLACES, 9) is ATTENTION  # which then says why it cannot be cut


def test_a_name_that_begins_alike_is_not_inside() -> None:
    assert attention_below("model.layers.1", {"model.layers.10.attn": ATTENTION}) is None
    assert attention_below("model.layers.10", {"model.layers.10.attn": ATTENTION}) is ATTENTION
    assert attention_below("", PLACES) is ATTENTION
