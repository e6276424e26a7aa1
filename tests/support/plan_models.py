"""Tiny models for the plan files: every file in `models/plans` has its shapes here, and a test holds each of them.

A shape is what it changes in a family's tiny config: sizes from `SIZES`, of which a config takes those that it has.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

PLANS = Path(__file__).resolve().parents[2] / "models" / "plans"
LAYERS, VOCABULARY = 2, 131  # a vocabulary that two ranks cannot share alike
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels"), 8),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "context_length", "max_target_positions"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "sliding_window": 5,
}
MAMBA = {"mamba_d_state": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
STATE_SPACE = {"state_size": 4, "time_step_rank": 4, "expand": 2}
STATE_SPACE_2 = {"num_heads": 8, "head_dim": 8, "state_size": 4, "expand": 2, "chunk_size": 4}
ZAMBA_2 = {
    "mamba_d_state": 4,
    "mamba_expand": 2,
    "mamba_headdim": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1,
    "chunk_size": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
}
WHOLE_HEADS = {"head_dim": 16, "num_key_value_heads": 4}
XLSTM = {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "num_blocks": 2, "ffn_round_up_to_multiple_of": 16}
THETA = {"rope_theta": 10000.0}
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2}}
EYES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
UNTIED = {"tie_word_embeddings": False}
DECODER = {"is_decoder": True}
PADDED_DECODER = {**DECODER, "pad_token_id": 1}  # its positions are counted from the padding

SHAPES: dict[str, list[dict[str, Any]]] = {
    "bamba": [{**MAMBA, "attn_layer_indices": [1]}],
    "bart": [{}, {**UNTIED, "scale_embedding": True}],
    "bert": [DECODER, {**DECODER, **UNTIED}],
    "bert-generation": [DECODER],
    "big_bird": [{**DECODER, "attention_type": "original_full"}],
    "bigbird_pegasus": [{}],
    "biogpt": [{}],
    "bitnet": [{}],
    "blenderbot": [{}],
    "blenderbot-small": [{}],
    "bloom": [{}, UNTIED],
    "camembert": [PADDED_DECODER],
    "codegen": [{}, {"num_attention_heads": 8}],
    "ctrl": [{}],
    "data2vec-text": [PADDED_DECODER],
    "dbrx": [
        {**DBRX, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, **THETA}},
        {**DBRX, "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, **THETA}},
    ],
    "diffllama": [{}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}],
    "doge": [{}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}],
    "electra": [DECODER],
    "ernie": [DECODER],
    "falcon": [
        {},
        {"bias": True, "parallel_attn": False, **UNTIED},
        {"alibi": True},
        {"multi_query": False, "num_kv_heads": 4, "alibi": True},
        {"new_decoder_architecture": True},
        {"new_decoder_architecture": True, "num_kv_heads": 1},
    ],
    "falcon_h1": [{**MAMBA, "mamba_d_ssm": 64}],
    "falcon_mamba": [STATE_SPACE],
    "git": [
        {"vision_config": EYES},
        {"vision_config": EYES, "tie_word_embeddings": True},
    ],
    "gpt2": [{}, UNTIED],
    "gpt_bigcode": [{}, {"multi_query": False, **UNTIED}],
    "gpt_neo": [{"attention_types": [[["global", "local"], 1]], "window_size": 5}],
    "gpt_neox_japanese": [{}],
    "gpt_oss": [{"layer_types": ["sliding_attention", "full_attention"]}, {"num_key_value_heads": 1}],
    "gptj": [{}],
    "hunyuan_v1_dense": [{}],
    "jetmoe": [{}],
    "lfm2": [
        {"layer_types": ["conv", "full_attention"]},
        {"layer_types": ["conv", "full_attention"], "conv_bias": True},
    ],
    "lfm3": [{"layer_types": ["conv", "full_attention"], "conv_bias": True}],
    "mamba": [STATE_SPACE, {**STATE_SPACE, "use_bias": True, **UNTIED}],
    "mamba2": [
        {**STATE_SPACE_2, "n_groups": 2},
        {**STATE_SPACE_2, "n_groups": 1, "use_bias": True, **UNTIED},
    ],
    "marian": [{}],
    "mbart": [{}],
    "megatron-bert": [DECODER],
    "modernbert-decoder": [
        dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    ],
    "moshi": [{}],
    "mpt": [{}, {"attn_config": {"clip_qkv": 0.5}, **UNTIED}],
    "mvp": [{}],
    "openai-gpt": [{}],
    "opt": [{}, {"word_embed_proj_dim": 16, "do_layer_norm_before": False, **UNTIED}],
    "pegasus": [{}],
    "persimmon": [{}, {"qk_layernorm": False}],
    "plbart": [{}],
    "recurrent_gemma": [
        {"block_types": ["recurrent", "attention"]},
        {"block_types": ["attention"], "num_key_value_heads": 1},
    ],
    "rembert": [{**DECODER, "input_embedding_size": 16, "output_embedding_size": 24}],
    "roberta": [PADDED_DECODER, {**PADDED_DECODER, **UNTIED}],
    "roberta-prelayernorm": [PADDED_DECODER],
    "roc_bert": [
        {
            **DECODER,
            "enable_pronunciation": False,
            "enable_shape": False,
            "shape_vocab_size": 9,
            "pronunciation_vocab_size": 9,
        }
    ],
    "roformer": [DECODER],
    "rwkv": [{}, {"attention_hidden_size": 64}],
    "stablelm": [{}, {"num_key_value_heads": 1, "use_parallel_residual": True, "use_qkv_bias": True}],
    "trocr": [{}],
    "whisper": [{}],
    "xglm": [{}],
    "xlm-roberta": [PADDED_DECODER],
    "xlm-roberta-xl": [PADDED_DECODER],
    "xlstm": [XLSTM, {**XLSTM, "use_bias": True, "mode": "train", "chunk_size": 13}],
    "xmod": [
        {**PADDED_DECODER, "default_language": "en_XX"},
        {**PADDED_DECODER, "default_language": "en_XX", **UNTIED},
    ],
    "zamba2": [
        ZAMBA_2,
        {**ZAMBA_2, "mamba_ngroups": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, **WHOLE_HEADS},
    ],
    "zamba": [{"layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "n_mamba_heads": 2}],
}


# Sizes that three ranks do not share equally: two key/value heads, and odd widths.
ODD_SIZES: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "lru_width"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "decoder_ffn_dim", "n_inner"), 37),
    **dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads"), 6),
}
ODD_SHAPES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "mamba_n_heads": 12, "attn_layer_indices": [1]},
    "codegen": {"num_attention_heads": 16, "hidden_size": 64},
    "falcon_h1": {**MAMBA, "mamba_n_heads": 12, "mamba_d_ssm": 96},
    "mamba2": {"num_heads": 12, "head_dim": 8, "state_size": 4, "expand": 2, "n_groups": 2},
    "moshi": {"ffn_dim": 74},
    "openai-gpt": {"num_attention_heads": 5, "hidden_size": 40},
    "xlm-roberta-xl": {**PADDED_DECODER, "num_attention_heads": 5, "hidden_size": 40},
}
# Whose forward counts on equal shares, or needs a key/value head on each rank.
REFUSED_ODD = {"dbrx", "doge", "jetmoe", "mamba2", "moshi", "zamba2"}


def plan_config(family: str, shape: dict[str, Any], sizes: dict[str, Any] = SIZES) -> PreTrainedConfig:
    """A tiny config of a family in a shape, without dropout."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    fields = {name: size for name, size in sizes.items() if hasattr(default, name) and not is_property(kind, name)}
    fields |= {name: 0.0 for name in dir(default) if ("drop" in name or "jitter" in name) and is_float(default, name)}
    return kind(**{**fields, "vocab_size": VOCABULARY, "use_cache": False, **shape})


def plan_model(family: str, shape: dict[str, Any], sizes: dict[str, Any] = SIZES) -> PreTrainedModel:
    """A random model of a family in a shape, biases and norms included, the same on every rank."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(plan_config(family, shape, sizes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def is_property(kind: type, name: str) -> bool:
    """Whether a config computes a field."""
    return isinstance(getattr(kind, name, None), property)


def is_float(config: Any, name: str) -> bool:
    """Whether a config's field is a float."""
    return isinstance(getattr(config, name, None), float)
