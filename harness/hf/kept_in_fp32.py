"""The parameters that a family keeps in float32 in a model of 16 bits, as transformers loads it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from harness.hf.lora import plain_name


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> frozenset[str]:
    """Names of the parameters that `from_pretrained(dtype=dtype)` leaves in float32, as the class of the model says."""
    patterns = list(model._get_dtype_plan(dtype))  # noqa: SLF001  # what `from_pretrained` goes by
    if not patterns:
        return frozenset()
    found, _, _ = build_glob_alternation(patterns)
    return frozenset(name for name, _ in model.named_parameters() if found.search(plain_name(name)))
