"""Find out on a tiny copy whether a model keeps the documents of a packed row apart.

A packed row holds several documents, with position ids that begin at 0 in each. A suitable model gives each document
the same logits as alone, with masks that keep documents apart (`harness/parallel/context/masks.py`). A model that makes
its masks by itself, carries a state along the row, or numbers positions by itself does not: its documents would see
each other.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from harness.errors import UserError, text_of
from harness.hf.forward.placeholders import takes_positions
from harness.hf.layers.attention import attention_of, choose_attention, is_flash, usual_attention
from harness.hf.layers.dry_run import CANNOT_RUN
from harness.hf.skeleton import too_few_key_heads, with_key_per_head
from harness.parallel.context.masks import documents_apart
from harness.verify.comparison import NOT_CAUSAL, looks_ahead, on_device
from harness.verify.tiny_copy import shrink, tiny_ids, tiny_model

LENGTHS = (13, 9, 10)
# Relative to the largest logit. Over the families of transformers 5.23, rounding changes logits by up to 2e-6, and
# another document that is seen changes them by at least 5e-3.
TOLERANCE = 1e-4
TOLERANCE_OF_HALF = 5e-2  # half precision shows only gross faults; the same model has been tried in fp32


def require_documents_apart(config: PretrainedConfig) -> None:
    """Try a tiny copy of the model of `config` on packed documents, on a CPU; a fraction of a second.

    Raises UserError if its documents see each other, or it cannot be tried.
    """
    worst = _try(config, usual_attention(config), torch.device("cpu"), torch.float32)
    if not worst <= TOLERANCE:
        raise _seen(config, worst)


def require_packable(config: PretrainedConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Try packed documents as this run has them, in micro-batches of `rows` rows. UserError if they see each other."""
    require_documents_apart(config)
    require_flash_apart(config, rows, device, dtype)


def require_flash_apart(config: PretrainedConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Try packed documents with flash-attention, on the run's device, for micro-batches of `rows` rows.

    Raises:
        UserError: documents see each other, or there is more than one row: transformers finds the documents by their
            position ids in a single row only.
    """
    if not is_flash(config):
        return
    if rows > 1:
        raise UserError(
            f"packing with {attention_of(config)}: transformers separates documents only in micro-batches of "
            f"one sample, but this one has {rows}: set the (evaluation) batch size per device to 1"
        )
    worst = _try(config, attention_of(config), device, dtype)
    if not worst <= TOLERANCE_OF_HALF:
        raise _seen(config, worst)


def _seen(config: PretrainedConfig, worst: float) -> UserError:
    if looks_ahead(shrink(config), torch.device("cpu")):
        return UserError(f"model type {config.model_type!r}: {NOT_CAUSAL}")
    return UserError(
        f"model type {config.model_type!r} does not separate packed documents: in a tiny copy other documents in "
        f"the row change the logits by {worst:.1%} of the largest: train without packing"
    )


def _try(config: PretrainedConfig, attention: str | None, device: torch.device, dtype: torch.dtype) -> float:
    """Return by how much other documents change the logits of a tiny copy. Raises UserError if it does not run."""
    try:
        tiny = shrink(config)
        choose_attention(tiny, attention)
        model = on_device(tiny_model(tiny, dtype=dtype), device)
        return _difference(model, tiny_ids(model)[:1].to(device))
    except (UserError, *CANNOT_RUN) as error:
        if (changed := with_key_per_head(config)) is not None:
            worst = _try(changed, attention, device, dtype)
            raise too_few_key_heads(config, changed) if worst <= TOLERANCE else _seen(changed, worst) from error
        raise UserError(
            f"model type {config.model_type!r} does not run on packed documents ({text_of(error, 160)}): train without "
            "packing"
        ) from error


@torch.no_grad()
def _difference(model: PreTrainedModel, ids: Tensor) -> float:
    """Return the largest relative difference between logits of documents packed into row `ids` and of each alone."""
    positions = torch.cat([torch.arange(length, device=ids.device) for length in LENGTHS])[None]
    given = {"position_ids": positions} if takes_positions(model) else {}
    with documents_apart(positions):
        packed = model(input_ids=ids, **given, use_cache=False).logits.float()
    starts = [0, *accumulate(LENGTHS)]
    worst = 0.0
    for start, document in zip(starts, ids.split(LENGTHS, dim=1), strict=False):
        alone = model(input_ids=document, use_cache=False).logits.float()
        change = (packed[:, start : start + document.shape[1]] - alone).abs().max() / alone.abs().max()
        worst = max(worst, float(change.nan_to_num(float("inf"))))
    return worst
