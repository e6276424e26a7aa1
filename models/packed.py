"""Whether a model keeps the documents of a packed row apart: tried on a tiny copy of it, known by no name.

A packed row holds several documents, and position ids that begin at 0 with each. A model that is right gives each
document the logits that it gives it alone. One that builds its masks of shapes alone, carries a state along the row,
or numbers positions by itself does not, and would learn from documents that have nothing to do with each other.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from harness.config.errors import UserError
from harness.models.attention import is_flash
from harness.models.tiny import shrink, tiny_ids, tiny_model

LENGTHS = (13, 9, 10)
# Of the largest logit. Over transformers 5.23's families rounding makes 2e-6, the least that a neighbour makes is 5e-3.
TOLERANCE = 1e-4
TOLERANCE_OF_HALF = 5e-2  # in half precision only gross faults can be seen: the same model has been tried in fp32
CANNOT_RUN = (UserError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def require_documents_apart(config: PretrainedConfig, inputs: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Try a tiny copy of the model of `config`, with its implementation of attention, on packed documents.

    Args:
        inputs: a micro-batch of ids, [batch, sequence], as the model will get them.
        device, dtype: that the model will run with; they matter to flash-attention alone.

    Raises:
        UserError: its documents see each other, it does not take position ids, or it cannot be tried.
    """
    flash = is_flash(config)
    if flash and len(inputs) > 1:
        raise UserError(
            f"packing with {config._attn_implementation}: transformers keeps documents apart in micro-batches of one "
            f"sample alone, this one has {len(inputs)}: set the (evaluation) batch size per device to 1"
        )
    name = f"model type {config.model_type!r}"
    try:
        tiny = shrink(config)
        worst = _difference(_tiny(tiny, None if flash else config._attn_implementation), tiny_ids(tiny)[:1])
        if flash and worst <= TOLERANCE:
            model: Any = _tiny(tiny, config._attn_implementation)
            half = _difference(model.to(device, dtype), tiny_ids(tiny)[:1].to(device))
            worst = 0.0 if half <= TOLERANCE_OF_HALF else half
    except CANNOT_RUN as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{name} does not run on packed documents ({reason}): train it without packing") from error
    if not worst <= TOLERANCE:
        raise UserError(
            f"{name} does not keep packed documents apart: in a tiny copy logits change by {worst:.1%} of the largest "
            "where others stand in the row: train it without packing"
        )


def _tiny(config: PretrainedConfig, attention: str | None) -> PreTrainedModel:
    config._attn_implementation = attention
    return tiny_model(config)


@torch.no_grad()
def _difference(model: PreTrainedModel, ids: Tensor) -> float:
    """The largest difference between the logits of documents packed into the row `ids` and of each alone, relative."""
    positions = torch.cat([torch.arange(length, device=ids.device) for length in LENGTHS])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    starts = [0, *accumulate(LENGTHS)]
    worst = 0.0
    for start, document in zip(starts, ids.split(LENGTHS, dim=1), strict=False):
        alone = model(input_ids=document, use_cache=False).logits.float()
        change = (packed[:, start : start + document.shape[1]] - alone).abs().max() / alone.abs().max()
        worst = max(worst, float(change.nan_to_num(float("inf"))))
    return worst
