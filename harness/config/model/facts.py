"""Facts stated by a model's config: experts, skipped layers, implausible sizes."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping

from harness.config.values.pointers import whole
from harness.errors import UserError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The usual names of the number of experts."""
_CHOSEN = ("num_experts_per_tok", "moe_top_k", "moe_topk", "num_experts_per_token", "moe_k")
MOST_LAYERS = 10_000  # ten times more than anybody has trained
MOST_EXPERTS = 100_000  # likewise
_MANY_LAYERS = re.compile(r"(\w+_)?(n_?layers?|(num_)?(\w+_)?(layers|blocks)|depth)", re.IGNORECASE)
_MANY_EXPERTS = re.compile(r"(\w+_)?experts", re.IGNORECASE)


def require_countable(config: Mapping[str, object], where: str) -> None:
    """Raise UserError for an absurd number of layers or experts, with which building the model would never end."""
    for names, most in ((_MANY_LAYERS, MOST_LAYERS), (_MANY_EXPERTS, MOST_EXPERTS)):
        for name, count in _counts(config, names):
            if count > most:
                raise UserError(f"{where}: {name} is {count:g}: must be at most {most:,}")


def _counts(config: object, names: re.Pattern[str]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of the entries of a config, and of nested configs, whose names match."""
    if not isinstance(config, Mapping):
        return
    for name, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and names.fullmatch(str(name)):
            # Python cannot print a larger integer with `:g`.
            yield str(name), value if value < sys.float_info.max else math.inf
        yield from _counts(value, names)


def experts_of(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of experts of a layer and the number per token; (0, 0) for a dense layer."""
    experts = next((n for name in EXPERTS if (n := whole(config.get(name)))), 0)
    chosen = next((n for name in _CHOSEN if (n := whole(config.get(name)))), 1)
    return experts, min(chosen, experts)


def layer_drop(config: Mapping[str, object]) -> float:
    """Return the probability with which a decoder skips layers in training (LayerDrop)."""
    rates = [config.get(name) for name in ("layerdrop", "decoder_layerdrop")]
    return max((float(rate) for rate in rates if isinstance(rate, (int, float))), default=0.0)


def require_every_layer(rate: float) -> None:
    """Raise UserError for a model that skips layers at random (LayerDrop): a pipeline always calls all its layers."""
    if rate > 0:
        raise UserError(
            f"layerdrop {rate}: this model skips layers at random in training, which pipeline stages cannot do: "
            "set it to 0 in the model's config.json"
        )
