"""A decoder's shape by any of the names that configs use, and what a config leaves out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from harness.errors import UserError
from harness.hf.counts import config_and_counts, read_config
from harness.planner.counted_shape import counted_decoder, with_counts
from harness.planner.model_config import SIZE_NAMES, NoSize, decoder_of, families, text_decoder
from harness.planner.shape import LayerShape, context
from harness.planner.workload import stages_of

PLAIN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
INFINITY = [0.0, {"__float__": "Infinity"}]  # as transformers writes it
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "moe_intermediate_size": 16}


def layer_of(**changes: Any) -> LayerShape:
    return decoder_of({**PLAIN, **changes}, "it").layers[0]


@pytest.mark.parametrize(
    ("size", "name"),
    [(size, name) for size in ("layers", "hidden", "heads", "vocab") for name in SIZE_NAMES[size]],
)
def test_a_size_has_any_of_its_names(size: str, name: str) -> None:
    usual = SIZE_NAMES[size][0]
    renamed = {key: value for key, value in PLAIN.items() if key != usual} | {name: PLAIN[usual]}
    plain, other = decoder_of(PLAIN, "it"), decoder_of(renamed, "it")
    assert (other.parameters, len(other.layers), other.vocab) == (plain.parameters, 3, 100)


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, None, {}], ids=repr)
def test_a_size_that_is_needed_and_none_is_told_by_its_usual_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^--model mine: its config.json gives no {name} above 0"):
        decoder_of({**PLAIN, name: value}, "mine")


@pytest.mark.parametrize("name", ["hidden_size", "num_key_value_heads", "intermediate_size", "num_experts_per_tok"])
@pytest.mark.parametrize("value", ["512", 512.0, -512, True, 10**400], ids=lambda value: repr(value)[:5])
def test_what_is_no_size_is_refused_and_not_taken_for_the_default(name: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^--model mine: {name} is .* in its config.json: write a whole number"):
        decoder_of({**PLAIN, "model_type": "llama", name: value}, "mine")


def test_layers_are_bounded_and_no_limit_may_be_written_below_0() -> None:
    with pytest.raises(UserError, match=r"num_hidden_layers is 1000000000 .* from 0 to 10,000"):
        decoder_of({**PLAIN, "num_hidden_layers": 10**9}, "mine")
    assert layer_of(sliding_window=-1).window == 0
    assert layer_of(num_key_value_heads=[1, 2, 1]).kv_heads == 2  # a list has a number for each layer


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        pytest.param({"decoder_sparse_step": 2}, "ded", id="each second one"),
        pytest.param({"interleave_moe_layer_step": 3}, "dde", id="each third one"),
        pytest.param({"mlp_only_layers": [1]}, "ede", id="all but some"),
        pytest.param({"moe_layers": [1]}, "ded", id="some"),
        pytest.param({"moe_layer_freq": 2}, "ede", id="each second one from the first on"),
        pytest.param({"moe_layer_freq": [0, 1, 1]}, "dee", id="layer by layer"),
        pytest.param({"mlp_layer_types": ["dense", "sparse", "dense"]}, "ded", id="by name"),
    ],
)
def test_experts_are_in_the_layers_that_the_config_names(changes: dict[str, Any], kinds: str) -> None:
    layers = decoder_of({**PLAIN, **EXPERTS, **changes}, "it").layers
    assert "".join("e" if layer.experts else "d" for layer in layers) == kinds


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        pytest.param({}, [8, 8, 8], id="everywhere"),
        pytest.param({"use_sliding_window": False}, [0, 0, 0], id="switched off"),
        pytest.param({"layer_types": ["sliding_attention", "full_attention", "x"]}, [8, 0, 0], id="by name"),
        pytest.param({"sliding_window_pattern": 3}, [8, 8, 0], id="but in each third layer"),
        pytest.param({"use_sliding_window": True, "max_window_layers": 2}, [0, 0, 8], id="from a layer on"),
        pytest.param({"model_type": "gemma2"}, [8, 0, 8], id="by the family"),
    ],
)
def test_a_window_is_in_the_layers_that_the_config_names(changes: dict[str, Any], windows: list[int]) -> None:
    layers = decoder_of({**PLAIN, "sliding_window": 8, **changes}, "it").layers
    assert [layer.window for layer in layers] == windows


def test_what_nobody_has_held_against_a_model_is_a_guess() -> None:
    sizes = {**PLAIN, "intermediate_size": 64}
    assert not decoder_of({**sizes, "model_type": "llama"}, "it").guessed
    assert not decoder_of({"model_type": "llama"}, "it").guessed  # all of the family's own
    assert decoder_of({**PLAIN, "model_type": "of tomorrow"}, "it").guessed
    assert decoder_of({"model_type": "deepseek_v4"}, "it").guessed  # 2.3% more than it has
    usual = families()["opt"]["unread"]["word_embed_proj_dim"]
    assert not decoder_of({**sizes, "model_type": "opt", "word_embed_proj_dim": usual}, "it").guessed
    assert decoder_of({**sizes, "model_type": "opt", "word_embed_proj_dim": 2 * usual}, "it").guessed
    assert decoder_of({**PLAIN, "model_type": "llama", "ffn_width": 64}, "it").guessed  # by a name of its own
    whole = {"model_type": "mistral3", "text_config": {**sizes, "model_type": "mistral"}}
    assert text_decoder(whole, "it").guessed  # whether its table is tied, the family of the whole model says
    assert not text_decoder({**whole, "tie_word_embeddings": False}, "it").guessed


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "bloom", "n_embed": 32, "n_layer": 2, "num_attention_heads": 4}, id="old names"),
        pytest.param({"model_type": "gpt_bigcode", "n_embd": 32, "n_head": 4, "multi_query": False}, id="derived size"),
        pytest.param({"model_type": "lfm2", "hidden_size": 32, "block_ff_dim": 96}, id="width by another key"),
        pytest.param({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, id="no attention"),
        pytest.param({"model_type": "opt", "hidden_size": 48, "word_embed_proj_dim": 16}, id="narrow table"),
        pytest.param(
            {"model_type": "mamba2", "hidden_size": 32, "head_dim": 8, "num_heads": 8, "time_step_limit": INFINITY},
            id="infinity",
        ),
    ],
)
def test_what_is_not_read_is_counted_on_the_model(config: dict[str, Any]) -> None:
    config = {"num_hidden_layers": 2, "vocab_size": 100, **config}
    with suppress(NoSize):
        assert text_decoder(config, "it").guessed
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(config))
    complete, counts = config_and_counts(config)
    shape = with_counts(decoder_of(complete, "it", counts), counts)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters()) and not shape.guessed
    assert len(stages_of(shape, 2, "balanced", 64, False)) == 2


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        pytest.param({}, {"query": 32, "key": 32, "value": 32, "ffn": 128, "kv_heads": 4}, id="what is left out"),
        pytest.param({"num_key_value_heads": 1}, {"query": 32, "key": 8, "value": 8}, id="one head of keys"),
        pytest.param({"num_key_value_heads": None}, {"key": 32}, id="null is as many as queries"),
        pytest.param({"head_dim": 16}, {"query": 64, "key": 64, "output": 64}, id="heads wider than the model"),
        pytest.param({"n_inner": None, "ffn_dim": 48}, {"ffn": 48}, id="the first name that has a number"),
        pytest.param({"sliding_window": 7}, {"window": 7}, id="a window"),
        pytest.param(MLA, {"query": 48, "key": 48, "value": 24, "output": 24, "q_rank": 0, "kv_rank": 16}, id="MLA"),
        pytest.param({**MLA, "q_lora_rank": 12}, {"q_rank": 12}, id="MLA with compressed queries"),
        pytest.param({"q_lora_rank": 12}, {"q_rank": 0, "rope": 0}, id="a rank of queries alone is none"),
        pytest.param(EXPERTS, {"ffn": 0, "experts": 8, "top_k": 2, "expert_ffn": 16}, id="experts"),
        pytest.param(
            {**EXPERTS, "moe_intermediate_size": None}, {"expert_ffn": 64}, id="experts as wide as a dense part"
        ),
        pytest.param({**EXPERTS, "num_experts_per_tok": 99}, {"top_k": 8}, id="no token meets more than there are"),
        pytest.param({**EXPERTS, "num_experts_per_tok": 0}, {"top_k": 1}, id="a token meets one at least"),
        pytest.param({**EXPERTS, "n_shared_experts": 2}, {"shared_ffn": 32}, id="shared experts by number"),
        pytest.param({**EXPERTS, "shared_expert_intermediate_size": 5}, {"shared_ffn": 5}, id="by width"),
        pytest.param({"num_experts": 0, "num_experts_per_tok": 2}, {"ffn": 128, "experts": 0}, id="no experts"),
    ],
)
def test_a_layer_has_what_the_config_says(changes: dict[str, Any], fields: dict[str, int]) -> None:
    layer = layer_of(**changes)
    assert {name: getattr(layer, name) for name in fields} == fields


@pytest.mark.parametrize(("dense", "kinds"), [(0, "eee"), (1, "dee"), (3, "ddd"), (9, "ddd")])
def test_the_first_layers_may_be_dense(dense: int, kinds: str) -> None:
    layers = decoder_of({**PLAIN, **EXPERTS, "first_k_dense_replace": dense}, "it").layers
    assert "".join("e" if layer.experts else "d" for layer in layers) == kinds
    assert [layer.ffn for layer in layers] == [64 if kind == "d" else 0 for kind in kinds]


def test_compressed_attention_has_the_matrices_of_the_paper() -> None:
    """DeepSeek-V2 (2024), section 2.1: queries down and up; keys and values down, beside a rotary key, and up."""
    queries, down, up = ((32, 12), (12, 48)), (32, 16 + 4), (16, 4 * 8 + 4 * 6)
    assert layer_of(**MLA, q_lora_rank=12).attention_matrices == (*queries, down, up)
    assert layer_of(**MLA).attention_matrices == ((32, 48), down, up)
    assert layer_of(num_key_value_heads=2).attention_matrices == ((32, 32 + 16 + 16),)


def test_biases_and_norms_are_those_of_the_family_or_of_the_config() -> None:
    plain = layer_of(model_type="llama").vectors
    assert plain == 2 * 32
    assert layer_of(model_type="llama", attention_bias=True).vectors == plain + 3 * 32 + 32
    assert layer_of(model_type="llama", mlp_bias=True, intermediate_size=48).vectors == plain + 2 * 48 + 32
    assert layer_of(model_type="llama", attention_bias=None).vectors == plain
    assert (
        layer_of(model_type="qwen2", num_key_value_heads=4).vectors == plain + 3 * 32
    )  # queries, keys and values always have theirs
    assert layer_of(attention_bias=True).vectors == plain  # which biases it means is not known without a family


def test_a_table_is_counted_once_where_it_is_tied_and_positions_have_theirs() -> None:
    tied, untied = (decoder_of({**PLAIN, "tie_word_embeddings": tie}, "it") for tie in (True, False))
    assert untied.parameters - tied.parameters == 100 * 32
    assert (tied.prologue_parameters, tied.epilogue_parameters) == (100 * 32, 100 * 32 + 32)
    opt = decoder_of({**PLAIN, "model_type": "opt", "max_position_embeddings": 50}, "it")
    assert opt.position_rows == 50 + 2
    assert decoder_of({**PLAIN, "max_position_embeddings": 50}, "it").position_rows == 0  # rotary: no table


def test_a_model_with_other_parts_is_planned_by_its_text() -> None:
    config = {"model_type": "llava", "hidden_size": 7, "text_config": PLAIN, "tie_word_embeddings": False}
    assert text_decoder(config, "it").hidden == 32
    assert not text_decoder(config, "it").tied
    outer = {**config, "text_config": {**PLAIN, "tie_word_embeddings": True}}
    assert not text_decoder(outer, "it").tied  # the whole model decides
    assert text_decoder({**PLAIN, "text_config": None}, "it").hidden == 32


@given(st.integers(1, 10_000), st.integers(0, 20_000))
def test_a_window_is_seen_as_often_as_tokens_see_it(sequence: int, window: int) -> None:
    layer = layer_of(sliding_window=window)
    seen = sum(min(before, window or sequence) for before in range(sequence)) / sequence
    assert context(layer, sequence) == pytest.approx(seen, abs=1)


def test_a_token_costs_six_operations_a_parameter_and_twelve_a_pair() -> None:
    """Narayanan et al. 2021, section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh), 4/3 of it with recomputation.

    Their attention is not causal, and so twice of this one.
    """
    hidden, depth, vocab, sequence = 64, 3, 1000, 256
    sizes = {"model_type": "gpt2", "n_embd": hidden, "n_layer": depth, "n_head": 4, "vocab_size": vocab}
    paper = 72 * depth * hidden**2 * (1 + sequence / (12 * hidden) + vocab / (12 * depth * hidden))
    assert decoder_of(sizes, "gpt").flops_per_token(sequence) == pytest.approx(paper)


@pytest.mark.parametrize("family", sorted(families()))
def test_what_is_known_of_a_family_makes_a_model(family: str) -> None:
    shape = decoder_of({"model_type": family}, family)
    assert shape.parameters > 0
    assert all(layer.active_parameters <= layer.matrix_parameters for layer in shape.layers)
    assert min(min(matrix) for layer in shape.layers for matrix in layer.attention_matrices) > 0


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, {"a": 1}], ids=repr)
def test_a_size_that_is_null_is_not_the_default_of_the_family(name: str, value: object) -> None:
    with pytest.raises(NoSize, match=f"gives no {name} above 0"):
        decoder_of({**PLAIN, "model_type": "llama", "intermediate_size": 64, name: value}, "mine")


def test_sizes_that_make_no_model_are_refused_and_experts_of_a_dense_family_are_counted() -> None:
    llama = {**PLAIN, "model_type": "llama", "intermediate_size": 64}
    with pytest.raises(UserError, match="gives 4 attention heads and a width of 2: no model has that"):
        decoder_of({**llama, "hidden_size": 2}, "mine")
    assert decoder_of({**llama, "num_experts": 8}, "it").guessed and not decoder_of(llama, "it").guessed
    assert decoder_of({**llama, "intermediate_size": None}, "it").guessed


@pytest.mark.parametrize("config", [{}, {"a": "\ud800"}, {"model_type": 5}])
def test_a_config_of_no_family_is_told_without_asking_transformers(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"nothing to plan, and it names no model_type, by which transformers would"):
        counted_decoder(config, "x")
