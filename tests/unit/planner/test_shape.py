"""A decoder's shape from its config.json: its parameters are those of the model that transformers builds."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import UserError
from harness.hf.locate import PRESETS, presets
from harness.planner.model_config import decoder_of, read_decoder

CHANGES = {
    "llama": {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 48, "num_hidden_layers": 3},
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 1000, "num_hidden_layers": 3},
    "qwen3_moe": {"num_experts": 12, "moe_intermediate_size": 96, "num_hidden_layers": 3},
    "mixtral": {"num_local_experts": 3, "intermediate_size": 200, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 77},
    "opt": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 96},
    "gpt_neox": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 200},
}


def counted(config: AutoConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("preset", presets())
def test_a_preset_has_the_parameters_of_its_model(preset):
    assert read_decoder(preset).parameters == counted(AutoConfig.from_pretrained(PRESETS / preset))


@pytest.mark.parametrize("family", CHANGES)
def test_a_config_has_the_parameters_of_its_model(family, tmp_path):
    """What the file leaves out has the family's default."""
    config = {"model_type": family, **CHANGES[family]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_decoder(str(tmp_path)).parameters == counted(AutoConfig.for_model(**config))


def test_a_token_meets_only_its_experts():
    layer = read_decoder("tiny-mixtral").layers[0]
    expert = 3 * layer.hidden * layer.expert_ffn
    assert layer.matrix_parameters - layer.active_parameters == (layer.experts - layer.top_k) * expert


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers_is_refused_in_one_line(layers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    with pytest.raises(UserError, match="num_hidden_layers"):
        read_decoder(str(tmp_path))


def test_a_window_that_is_null_is_none():
    config = {"model_type": "mistral", "num_hidden_layers": 1}
    assert decoder_of(config, "its family's").layers[0].window == 4096
    assert decoder_of(config | {"sliding_window": 512}, "its own").layers[0].window == 512
    assert decoder_of(config | {"sliding_window": None}, "none").layers[0].window == 0
