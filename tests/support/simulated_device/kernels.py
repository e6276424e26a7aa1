"""Attention that a GPU alone has, on the simulated device: functions with the interface of the real ones.

They are as strict about what they are given, and compute with torch's own.

Of flash-attention's package there are the two functions that transformers calls. torch's flex attention computes the
model's function of masks uncompiled. What torch compiles else, as DeepSpeed's Muon, runs uncompiled too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as of_transformers

from harness.hf.layers import attention
from tests.support.ranks import here
from tests.support.simulated_device.device import NAME

CALLED: set[str] = set()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Attention of whole sequences: query, key and value are [batch, tokens, heads, size]."""
    CALLED.add("flash")
    _require_fit(4, q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return found.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Attention of documents one after the other [tokens, heads, size], which begin at the numbers of `cu_seqlens`."""
    CALLED.add("flash, documents")
    _require_fit(3, q, k, v)
    for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert starts.device == q.device and starts.dtype == torch.int32 and starts.is_contiguous()
        assert int(starts.diff().max()) == int(longest)
    tokens = torch.arange(len(q), device=q.device)
    documents = torch.searchsorted(cu_seqlens_q, tokens, right=True)
    mask = documents[:, None] == documents
    if causal:
        mask &= tokens[:, None] >= tokens
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=softmax_scale, enable_gqa=True)
    return found[0].transpose(0, 1)


def _require_fit(dims: int, *projected: Tensor) -> None:
    """What the kernels refuse."""
    assert {x.device.type for x in projected} == {here().type}
    assert {x.dtype for x in projected} <= {torch.bfloat16} or {x.dtype for x in projected} <= {torch.float16}
    assert all(x.dim() == dims and x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in projected)
    assert projected[0].shape[-2] % projected[1].shape[-2] == 0


def _flex(query: Tensor, key: Tensor, value: Tensor) -> None:
    CALLED.add("flex")
    assert {x.device.type for x in (query, key, value)} == {here().type}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Have them meanwhile; on a GPU those of flash-attention alone, as torch has flex attention there."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
    )
    vars(padding).update(pad_input=of_transformers._pad_input, unpad_input=of_transformers._unpad_input)
    there: Any = lambda *_: True  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, {"flash_attn": package, "flash_attn.bert_padding": padding}))
        matrix = of_transformers.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
        stack.enter_context(patch.dict(matrix, {"general_availability_check": there}))
        for module in (of_transformers, attention):
            stack.enter_context(patch.object(module, "is_flash_attn_2_available", there))
        stack.enter_context(patch.object(flex_attention, "_validate_device", _flex))
        if here().type == NAME:
            stack.enter_context(patch.object(attention, "FLEX_DEVICES", (NAME,)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
