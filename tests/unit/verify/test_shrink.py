"""Tiny sizes by the names of fields alone: what must agree still agrees, for drawn numbers of heads and layers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.verify.shrink import (
    MOST_HEADS,
    MOST_LAYERS,
    choose,
    fewer_heads,
    parts_of,
    read_table,
    shrink_fields,
    varied,
)

TABLE = read_table()
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"num_hidden_layers": 32, "vocab_size": 128_256, "intermediate_size": 14_336, "rms_norm_eps": 1e-5}


def tiny(tensor: int = 1, **changes: Any) -> dict[str, Any]:
    return shrink_fields({**LLAMA, **changes}, TABLE, tensor)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 8))
def test_heads_are_shared_by_ranks_as_before(key_value: int, group: int, tensor: int) -> None:
    query = key_value * group
    assume(query >= tensor)
    found = fewer_heads({query, key_value}, tensor)
    small, own = found[query], found[key_value]
    assert small % own == 0 and small >= own >= 1
    assert (small % tensor == 0) == (query % tensor == 0)
    assert (own >= tensor) == (key_value >= tensor)
    assert (small == own) == (query == key_value)
    assert small <= max(8 * MOST_HEADS, query)


def test_heads_that_are_few_stay_and_none_stay_none() -> None:
    assert fewer_heads([], 4) == {}
    assert fewer_heads({4}, 1) == {4: 4}
    assert fewer_heads({3, 1}, 1) == {3: 3, 1: 1}


@given(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40))
def test_of_every_kind_of_layer_the_first_stays_in_its_place(kinds: list[str]) -> None:
    chosen = choose(kinds)
    assert chosen == sorted(set(chosen)) and chosen[-1] < len(kinds)
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:MOST_LAYERS]
    assert set(firsts) <= set(chosen)
    assert len(chosen) == min(len(kinds), MOST_LAYERS, max(4, len(firsts)))


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        pytest.param({}, {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}, id="heads of 16"),
        pytest.param({}, {"vocab_size": 320, "intermediate_size": 96, "num_hidden_layers": 4}, id="at most"),
        pytest.param({"vocab_size": 100}, {"vocab_size": 100}, id="what is small stays"),
        pytest.param({"head_dim": 128}, {"head_dim": 16}, id="heads as wide as the model"),
        pytest.param({"head_dim": 256}, {"head_dim": 32}, id="wider heads stay wider"),
        pytest.param({"head_dim": 64}, {"head_dim": 8}, id="narrower ones narrower"),
        pytest.param({"attention_dropout": 0.1, "rms_norm_eps": 1e-5}, {"attention_dropout": 0.0}, id="dropout"),
        pytest.param({"attn_drop": 1}, {"attn_drop": 1}, id="a whole number is no rate"),
        pytest.param({"embedding_size": 2048}, {"embedding_size": 64}, id="half as wide stays half as wide"),
        pytest.param({"embedding_size": 768}, {"embedding_size": 128}, id="no simple part of it"),
        pytest.param(
            {"pad_token_id": 128_001, "eos_token_id": [9, 10]}, {"pad_token_id": 1, "eos_token_id": None}, id="ids"
        ),
        pytest.param({"bos_token_id": None}, {"bos_token_id": None}, id="no id"),
        pytest.param({"use_cache": True, "name": "x"}, {"use_cache": True, "name": "x"}, id="what is no size"),
        pytest.param({"intermediate_size": [14_336, 50]}, {"intermediate_size": [96, 50]}, id="a list of sizes"),
    ],
)
def test_a_field_becomes_tiny_by_its_name(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    found = tiny(**changes)
    assert {name: found[name] for name in fields} == fields


def test_what_speaks_of_single_layers_speaks_of_those_that_stay() -> None:
    kinds = ["conv"] * 15 + ["full_attention"] + ["conv"] * 16
    found = tiny(layer_types=kinds, mlp_only_layers=[0, 31], first_k_dense_replace=2, num_kv_shared_layers=1)
    depth = found["num_hidden_layers"]
    assert len(found["layer_types"]) == depth <= MOST_LAYERS
    assert found["layer_types"].count("full_attention") == 1
    assert found["mlp_only_layers"] == [0, depth - 1]
    assert found["first_k_dense_replace"] in (1, 2) and found["num_kv_shared_layers"] == 1


def test_layers_with_fields_of_their_own_keep_them_by_their_new_place() -> None:
    own = {"7": {"num_key_value_heads": 4}, "20": {"intermediate_size": 28_672}}
    found = tiny(per_layer_config={int(index): fields for index, fields in own.items()})
    kept = found["per_layer_config"]
    assert len(kept) == 2 and set(kept) <= set(range(found["num_hidden_layers"]))
    heads, wide = (kept[place] for place in sorted(kept))
    assert heads["num_key_value_heads"] < found["num_key_value_heads"] * 2
    assert wide["intermediate_size"] == 2 * found["intermediate_size"]


def test_a_config_inside_is_made_tiny_too_and_the_given_one_stays_as_it_was() -> None:
    outer = {"model_type": "llava", "text_config": {**LLAMA}, "vision_config": {"hidden_size": 1024, "image_size": 336}}
    found = shrink_fields(outer, TABLE)
    assert found["text_config"] == tiny()
    assert found["vision_config"]["image_size"] == 32
    assert outer["text_config"] == LLAMA
    assert [part.get("model_type") for part in parts_of(outer)] == ["llava", "llama", None]


@given(st.integers(1, 6), st.integers(1, 40_000))
def test_a_width_is_divided_by_the_ranks_as_before(tensor: int, width: int) -> None:
    found = tiny(tensor, intermediate_size=width)["intermediate_size"]
    assert 0 < found <= 96 + tensor
    assert (found % tensor == 0) == (width % tensor == 0)


@pytest.mark.parametrize(
    ("variant", "wanted"),
    [
        ({}, {"a": 1, "b": None, "c_dim": 3, "inner": {"x": 1}}),
        ({"set": {"a": 7, "new": 1}}, {"a": 7, "b": None, "c_dim": 3, "inner": {"x": 1}}),
        ({"fill": {"a": 7, "b": 5, "new": 1}}, {"a": 1, "b": 5, "c_dim": 3, "inner": {"x": 1}}),
        ({"left_out": ["*_dim", "b"]}, {"a": 1, "inner": {"x": 1}}),
        (
            {"inside": {"inner": {"y": 2}, "other": {"y": 2}}},
            {"a": 1, "b": None, "c_dim": 3, "inner": {"x": 1, "y": 2}},
        ),
    ],
    ids=["nothing", "set where there is one", "filled in where it is null", "left out", "inside of what is there"],
)
def test_a_variant_changes_what_is_there(variant: dict[str, Any], wanted: dict[str, Any]) -> None:
    fields = {"a": 1, "b": None, "c_dim": 3, "inner": {"x": 1}}
    assert varied(fields, variant) == wanted
    assert fields == {"a": 1, "b": None, "c_dim": 3, "inner": {"x": 1}}
