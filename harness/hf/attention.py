"""Which implementation of attention a model runs with: `--attn_implementation`, by transformers' names.

Without a setting the config.json's own is taken, and without that transformers' default: sdpa where the model has it,
else eager. Flash-attention is taken from its installed package alone, on a GPU, in half precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from harness.errors import UserError

FLASH, FLEX = "flash", "flex_attention"


def with_attention(config: PretrainedConfig, wanted: str | None) -> PretrainedConfig:
    """`config`, or a copy of it, that asks for the `wanted` implementation, or for its own where that is None.

    Whether the model has it is seen when it is built.
    """
    if wanted is not None:
        config = copy.deepcopy(config)
        choose_attention(config, wanted)
    return config


def attention_of(config: PretrainedConfig) -> str | None:
    """Return the implementation that a config asks for; None for transformers' default."""
    name: str | None = config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
    return name


def choose_attention(config: PretrainedConfig, name: str | None) -> None:
    """Let a config ask for an implementation; None for transformers' default."""
    config._attn_implementation = name  # noqa: SLF001  # transformers has no public name for it


def is_flash(config: PretrainedConfig) -> bool:
    """Whether the model runs with flash-attention."""
    return FLASH in str(attention_of(config))


@contextmanager
def on_any_device(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that runs with flash-attention be tried on the CPU, on the meta device and in fp32."""
    wanted = attention_of(model.config)
    if is_flash(model.config):
        has_sdpa = model._supports_sdpa  # noqa: SLF001  # what a class of transformers says of itself
        choose_attention(model.config, "sdpa" if has_sdpa else "eager")
    try:
        yield
    finally:
        if attention_of(model.config) != wanted:
            choose_attention(model.config, wanted)


def require_available(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """UserError for flash-attention where its package or a GPU is missing, or in fp32; and for flex_attention."""
    name = str(attention_of(config))
    if name == FLEX:
        raise UserError(f"attention implementation {name}: not supported: give --attn_implementation sdpa")
    if not is_flash(config):
        return
    available = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    if name not in available:
        raise UserError(
            f"attention implementation {name}: of flash-attention only {' and '.join(available)} are supported"
        )
    if device.type == "cpu" or not available[name]():
        raise UserError(
            f"attention implementation {name}: needs a GPU and its Python package, and one of the two is missing here"
        )
    if dtype == torch.float32:
        raise UserError(f"attention implementation {name}: supports bf16 and fp16 only, but this run uses fp32")
