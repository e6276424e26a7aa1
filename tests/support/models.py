"""The factory of tiny random models: a family's own config in sizes that cost next to nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """A tiny config of a family, with grouped-query attention where it has it."""
    return CONFIG_MAPPING[family](**{**SIZES, **changes})


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of a family, the same each time, as it is for evaluation."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(family, **changes)).float().eval()
