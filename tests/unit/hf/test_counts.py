"""Parameters are counted on the model itself, layer by layer, and the planner's shape is held to them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.hf.counts import parameter_counts, read_config
from harness.hf.skeleton import build_skeleton
from harness.planner.counted_shape import with_counts
from harness.planner.model_config import text_decoder

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
KV = {"num_key_value_heads": 2, "intermediate_size": 96}
# families and keys whose parameters their sizes do not tell
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": KV,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "doge": {**KV, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
    "jamba": {**KV, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_experts": 4},
    "llama4_text": {**KV, "intermediate_size_mlp": 128, "num_local_experts": 4, "head_dim": 16},
    "qwen3_moe": {**KV, "mlp_only_layers": [0], "decoder_sparse_step": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "granitemoehybrid": {**KV, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 8},
    "gemma3n_text": {**KV, "layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 0},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_shape_has_the_parameters_of_the_model(family: str) -> None:
    config = {"model_type": family, **SIZES, **FAMILIES[family]}
    model = build_skeleton(read_config(config))
    counts = parameter_counts(model)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert counts.total == elements and len(counts.layers) == 4
    shape = with_counts(text_decoder(model.config.to_dict(), family), counts)
    assert (shape.parameters, shape.guessed) == (elements, False)
    for layer, own in zip(shape.layers, counts.layers, strict=True):
        assert layer.parameters == own.matrices + own.experts + own.vectors
        assert bool(layer.experts) == bool(own.experts)


def test_a_parameter_that_layers_share_counts_once() -> None:
    model = build_skeleton(read_config({"model_type": "zamba2", "vocab_size": 256}))
    counts = parameter_counts(model)
    assert sum(one.matrices + one.experts + one.vectors for one in counts.layers) < counts.total
