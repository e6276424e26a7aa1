"""The dtypes that parameters and buffers have in a model of 16 bits, as transformers loads it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from harness.errors import UserError
from harness.hf.lora import plain_name
from harness.hf.skeleton import build_skeleton


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> frozenset[str]:
    """Names of the parameters that `from_pretrained(dtype=dtype)` leaves in float32, as the class of the model says."""
    return _kept(model, (name for name, _ in model.named_parameters()), dtype)


def buffer_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of a model's floating buffers after `from_pretrained(dtype=dtype)`, by their names.

    They are those that its constructor gives them where `dtype` is the default, but for saved ones that the class of
    the model keeps in float32.
    """
    names = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if dtype == torch.float32 or not names:
        return {}
    try:
        built = build_skeleton(model.config, dtype)
    except UserError:  # a class of a user's own, which transformers does not make of a config
        return {}
    made = {name: buffer.dtype for name, buffer in built.named_buffers()}
    found = {name: made[plain_name(name)] for name in names if plain_name(name) in made}
    kept = _kept(model, found.keys() & model.state_dict().keys(), dtype)
    return found | dict.fromkeys(kept, torch.float32)


def _kept(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> frozenset[str]:
    patterns = list(model._get_dtype_plan(dtype))  # noqa: SLF001  # what `from_pretrained` goes by
    if not patterns:
        return frozenset()
    found, _, _ = build_glob_alternation(patterns)
    return frozenset(name for name in names if found.search(plain_name(name)))
