"""The shapes of models of published measurements: what rows say of them, and what they leave out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from harness.planner.shape import DecoderShape, LayerShape

# routed experts, experts of a token, shared experts, dense layers ahead: from the models' own configs
EXPERTS = {
    "Qwen3": (128, 8, 0, 0),
    "Qwen3.6": (256, 8, 1, 0),
    "DeepSeek": (256, 8, 1, 3),
    "DeepSeek-V2": (160, 6, 2, 1),
    "GPT OSS": (128, 4, 0, 0),
    "GPT-OSS": (128, 4, 0, 0),
    "Mixtral": (8, 2, 0, 0),
}
LATENT = {"q_rank": 1536, "kv_rank": 512, "rope": 64}  # of multi-head latent attention
UNGATED = ("GPT-", "GPT3", "GPT ", "MPT", "MT-NLG", "Megatron", "OPT", "Nemotron")
HEAD_SIZES = {"Qwen3": 128, "Qwen3.6": 256, "GPT OSS": 64, "GPT-OSS": 64}


class Unusable(Exception):
    """A row that cannot be predicted, with the reason."""


def number(row: dict[str, str], key: str, default: int = 1) -> int:
    """Return a whole number of a row, or the default."""
    return int(float(row[key])) if row[key] else default


def first_of(table: dict[str, Any], name: str) -> Any:
    """Return the entry whose key the name begins with, the longest key first."""
    return next((table[key] for key in sorted(table, key=len, reverse=True) if name.startswith(key)), None)


def shape_of(row: dict[str, str]) -> DecoderShape:
    """Return the shape of a row's model."""
    tp = number(row, "tp")
    vocab = number(row, "vocab", 51200)
    padded = vocab if tp == 1 else -(-vocab // (128 * tp)) * 128 * tp  # as Megatron does by default
    shape = _shape(padded, *(row[key] for key in ("model", "layers", "hidden", "ffn", "heads", "kv_heads")))
    if shape is None:
        raise Unusable("the shape of the model is not published")
    return shape


@cache
def _shape(
    vocab: int, model: str, layers: str, hidden: str, ffn: str, heads: str, kv_heads: str
) -> DecoderShape | None:
    width, count = int(hidden), int(heads)
    head = first_of(HEAD_SIZES, model) or width // count
    kv = int(kv_heads or heads) * head
    gated = not model.startswith(UNGATED) or model.startswith(("GPT OSS", "GPT-OSS"))
    common: dict[str, Any] = dict(hidden=width, heads=count, kv_heads=int(kv_heads or heads), gated=gated)
    common |= dict(native_norms=not gated and not model.startswith("Nemotron"))
    common |= dict(query=count * head, key=kv, value=kv, output=count * head, vectors=2 * width)
    if model.startswith("DeepSeek"):
        common |= dict(query=count * 192, key=count * 192, value=count * 128, output=count * 128, **LATENT)
    dense = LayerShape(**common, ffn=int(ffn) if ffn else 4 * width)
    experts = first_of(EXPERTS, model)
    if experts is None:
        return DecoderShape(layers=(dense,) * int(layers), vocab=vocab, tied=model.startswith("Llama-3.2"))
    routed, top_k, shared, ahead = experts
    sparse = LayerShape(**common, experts=routed, top_k=top_k, expert_ffn=int(ffn), shared_ffn=shared * int(ffn))
    first = replace(dense, ffn=18432 if model.startswith("DeepSeek") else int(ffn))
    if int(layers) < 10:
        ahead = min(ahead, 1)
    return DecoderShape(layers=(first,) * ahead + (sparse,) * (int(layers) - ahead), vocab=vocab)
