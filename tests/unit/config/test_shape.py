"""What is read of a model's config.json: its sizes by whatever name, and whether it can be trained at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.model.facts import layer_drop, require_countable, require_every_layer
from harness.config.model.families import require_trainable_config
from harness.config.model.shape import read_model_config, read_shape
from harness.errors import UserError
from harness.hf.locate import model_directory


def written(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param({"n_layer": 2, "n_head": 4, "n_embd": 8, "n_inner": 32}, (2, 4, None, 8, 32), id="older names"),
        pytest.param({"num_layers": 2, "num_heads": 4, "d_model": 8, "ffn_dim": 16}, (2, 4, None, 8, 16), id="others"),
        pytest.param(
            {"num_hidden_layers": 3, "n_layer": 9, "num_key_value_heads": 2, "moe_intermediate_size": 7},
            (3, None, 2, None, 7),
            id="the first name counts",
        ),
        pytest.param(
            {"text_config": {"num_hidden_layers": 5}, "num_hidden_layers": 1},
            (5, None, None, None, None),
            id="of the text decoder",
        ),
        pytest.param({"text_config": None, "num_hidden_layers": 1}, (1, None, None, None, None), id="which is none"),
        pytest.param({"num_hidden_layers": "2", "num_attention_heads": [4]}, (None,) * 5, id="what is no number"),
        pytest.param({}, (None,) * 5, id="nothing"),
    ],
)
def test_sizes_are_read_by_whatever_name(config: dict[str, Any], sizes: tuple[int | None, ...], tmp_path: Path) -> None:
    found = read_shape(written(tmp_path, config))
    assert (found.layers, found.heads, found.kv_heads, found.hidden, found.intermediate) == sizes


def test_a_model_is_a_preset_a_folder_a_file_or_a_type(tmp_path: Path) -> None:
    folder = written(tmp_path, {"model_type": "llama", "num_hidden_layers": 7})
    assert read_shape(folder).layers == read_shape(f"{folder}/config.json").layers == 7
    assert isinstance(read_shape("tiny-llama").layers, int)
    assert read_model_config("qwen2") == {"model_type": "qwen2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("{", "no readable config.json; name a directory with config.json", id="broken"),
        pytest.param("[1]", "config.json is not an object", id="a list"),
        pytest.param("[" * 100_000, "no readable config.json", id="too deep"),
        pytest.param(
            None, "no readable config.json; name a directory with config.json, a model type, a preset (", id="none"
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_a_line(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as refused:
        read_model_config(str(tmp_path))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        ({}, 0.0),
        ({"layerdrop": 0.1}, 0.1),
        ({"layerdrop": 0, "decoder_layerdrop": 0.2}, 0.2),
        ({"layerdrop": None, "decoder_layerdrop": "much"}, 0.0),
    ],
)
def test_layers_that_are_skipped_are_refused(config: dict[str, Any], rate: float) -> None:
    assert layer_drop(config) == rate
    if rate:
        with pytest.raises(UserError, match=f"layerdrop {rate}: this model skips layers at random in training"):
            require_every_layer(rate)
    else:
        require_every_layer(rate)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"model_type": "llama"}, "", id="it can"),
        pytest.param({"model_type": "of_tomorrow"}, "", id="not known"),
        pytest.param({}, "", id="no type"),
        pytest.param(
            {"model_type": "bert"},
            "model type 'bert': its logits depend on later tokens, so it is not a causal "
            "decoder: set is_decoder to true in its config.json",
            id="an encoder",
        ),
        pytest.param({"model_type": "bert", "is_decoder": True}, "", id="made a decoder"),
        pytest.param({"model_type": "bert", "base_model_tp_plan": {}}, "", id="with a plan of its own"),
        pytest.param(
            {"model_type": "of_tomorrow", "text_config": {"model_type": "bert"}}, "model type 'bert'", id="a part"
        ),
        pytest.param({"model_type": "llama", "text_config": [1]}, "", id="a part that is none"),
    ],
)
def test_a_family_that_cannot_be_trained_is_told_at_once(config: dict[str, Any], said: str) -> None:
    if not said:
        require_trainable_config(config, is_type_alone=False)
        return
    with pytest.raises(UserError) as refused:
        require_trainable_config(config, is_type_alone=False)
    assert str(refused.value).startswith(said)
    require_trainable_config(config, is_type_alone=True)  # of a type alone nothing is said that a config could change


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1e9},
        {"n_layer": 10**90},
        {"text_config": {"num_layers": 10_001}},
        {"decoder_layers": 2, "num_decoder_layers": 10**6},
        {"num_local_experts": 10**6},
        {"n_routed_experts": 10**6},
    ],
)
def test_a_model_that_nobody_could_build_is_refused_at_once(sizes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    for read in (read_shape, model_directory):
        with pytest.raises(UserError, match=r"config.json: \w+ is \S+: must be at most 10"):
            read(str(tmp_path))


def test_other_numbers_of_a_model_may_be_large():
    require_countable({"num_hidden_layers": 126, "max_position_embeddings": 10**7, "max_window_layers": 80}, "x")
    require_countable({"num_experts": 2048, "rope_theta": 1e30, "layer_norm_eps": 1e-5, "vocab_size": 10**6}, "x")


def test_a_model_type_that_is_not_a_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": []}')
    with pytest.raises(UserError, match=r"model_type in its config\.json is not a text"):
        read_shape(str(tmp_path))
