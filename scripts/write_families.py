#!/usr/bin/env python
"""Write harness/planner/families.json: how the layers of each family are made, and the defaults of its sizes.

Every family that transformers can build from its default config is built on the meta device, where it takes no
memory, and its norms, biases and matrices are counted by their shapes. A family is left out where the planner would
miscount its parameters by more than 3%; `off` is the error of one that it does not count exactly. Then each key of its
config is changed, in a config.json with all keys and in one with this key alone, and those by which the planner would
miscount are written down with their defaults (`unread`): a config.json that sets one of them otherwise is counted on
the model itself, or said to be a guess. Run it after an update of transformers (half an hour), or for some families:

    python scripts/write_families.py [FAMILY ...]
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from harness.config.model.plans import families_of_matrix
from harness.extras.fusing.fused import fuse
from harness.planner import model_config

LARGEST_ERROR, LARGEST_CHANGE = 0.03, 0.01
SMALL = 16  # small numbers, such as indices of layers to treat differently
FEW = 8  # layers of the models whose keys are changed
FINE = re.compile("drop|eps|std|range|theta|coef|clip|prob|temp|scal|limit|momentum|beta|rate|alpha|loss|cap|init")
# keys that name no size, or on which no count of parameters depends
UNSIZED = {"architectures", "dtype", "id2label", "label2id", "transformers_version", "tokenizer_class", "model_type"}
FILE = Path(model_config.__file__).with_name("families.json")


def main() -> None:
    """Write the file and print what could not be counted."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    wanted = sys.argv[1:] or sorted(families_of_matrix())
    found, missed = dict(model_config.families()) if sys.argv[1:] else {}, []
    for family in wanted:
        entry = described(family)
        print(family, end=" ", flush=True)
        if entry is None:
            missed.append(family)
        else:
            found[family] = entry
    lines = ",\n".join(f"  {json.dumps(family)}: {json.dumps(entry)}" for family, entry in sorted(found.items()))
    FILE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    print(f"{len(found)} families; left out: {', '.join(missed)}")


def described(family: str) -> dict[str, Any] | None:
    """Return the entry of a family; None where it cannot be built, or where its parameters would be miscounted."""
    known = model_config.families()
    try:
        config = CONFIG_MAPPING[family]().get_text_config(decoder=True)
        model = on_meta(config)
        known[family] = entry_of(model, config)
        shape = model_config.decoder_of({"model_type": family}, family)
    except Exception:  # a family may refuse its own defaults, or be built otherwise
        known.pop(family, None)
        return None
    off = shape.parameters / sum(parameter.numel() for parameter in model.parameters()) - 1
    if off:
        known[family]["off"] = float(f"{off:.2g}")
    if abs(off) > LARGEST_ERROR:
        del known[family]
        return None
    known[family]["unread"] = unread_keys(family, config)
    return known[family]


def unread_keys(family: str, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of a family's config by which its parameters change otherwise than the planner reads, with their
    defaults."""
    usual = config.to_dict()
    few: dict[str, Any] = {"num_hidden_layers": min(FEW, config.num_hidden_layers)}
    try:
        before = error_of(family, type(config)(**few))
    except Exception:  # it has a list with an entry for each layer
        few, before = {}, error_of(family, config)
    found = {}
    for key, value in usual.items():
        if key in UNSIZED or key.startswith("_") or (isinstance(value, float) and FINE.search(key)):
            continue
        for other in others(key, value):
            try:
                made = type(config)(**{**few, key: other})
                true = parameters_of(made)
                offs = [read(family, each) / true - 1 for each in (made.to_dict(), {**few, key: other})]
            except Exception:  # not every value goes with the other defaults, and the planner refuses some
                continue
            if any(abs(off - before) > LARGEST_CHANGE for off in offs):
                found[key] = value
                break
    return found


def error_of(family: str, config: PretrainedConfig) -> float:
    """Return the error of the planner's count of a config's parameters. UserError where it refuses to count."""
    return read(family, config.to_dict()) / parameters_of(config) - 1


def read(family: str, content: dict[str, Any]) -> int:
    """Return the parameters that the planner reads of a config.json."""
    return model_config.decoder_of({**content, "model_type": family}, family).parameters


def parameters_of(config: PretrainedConfig) -> int:
    """Return the parameters of the model of a config."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def others(key: str, value: object) -> list[Any]:
    """Return other values of a key, to see what it does."""
    match value:
        case bool():
            return [not value]
        case int():
            none = [0] if value < SMALL and "expert" not in key else []  # a width of 0 is no model
            return [2 * value + 2, value // 2, value + 1, *none]
        case float():
            return [2 * value, value / 2]
        case None:
            return [True, 2, 64]
        case [str(), *_]:
            return [[kind] * len(value) for kind in sorted(set(value))]
        case []:
            return [[0]]
    return []


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of a config, without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def entry_of(model: PreTrainedModel, config: PretrainedConfig) -> dict[str, Any]:
    """Return the traits that differ from the usual, and the default sizes."""
    sizes = own_sizes(config)
    stack = next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    )
    inside = {id(module) for layer in stack for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    traits = layer_traits(stack[-1], config) | outer_traits(model, outside, config)
    usual = vars(model_config.Traits())
    entry: dict[str, Any] = {"traits": {key: value for key, value in traits.items() if usual[key] != value}}
    default = getattr(config, "attention_bias", None)
    if isinstance(default, bool):
        config.attention_bias = True
        last = next(m for m in on_meta(config).modules() if isinstance(m, nn.ModuleList) and len(m) == len(stack))[-1]
        entry["output_follows_bias"] = layer_traits(last, config)["output_bias"]
    switches = {key: getattr(config, key, None) for key in model_config.DEFAULTS}
    switches = {key: value for key, value in switches.items() if isinstance(value, int)}  # a bool is one too
    period = window_period(config)
    if period and not any("pattern" in key for key in switches):
        switches["sliding_window_pattern"] = period
    return entry | {"sizes": sizes} | ({"defaults": switches} if switches else {})


def window_period(config: PretrainedConfig) -> int | None:
    """Return the n of a family in which each nth layer has no window; None where its layers are not made so."""
    kinds = getattr(config, "layer_types", None) or []
    whole = [kind != "sliding_attention" for kind in kinds]
    period = whole.index(True) + 1 if any(whole) else 0
    fits = period > 1 and whole == [(index + 1) % period == 0 for index in range(len(whole))]
    return period if fits else None


def own_sizes(config: PretrainedConfig) -> dict[str, int]:
    """Return the default sizes, without those that follow from the width or the number of heads."""
    sizes = sizes_of(config)
    for name, factor in (("hidden_size", 2), ("num_attention_heads", 2)):
        try:
            changed = sizes_of(type(config)(**{name: factor * getattr(config, name)}))
        except Exception:  # it does not fit the other defaults
            continue
        named = {"hidden_size": "hidden", "num_attention_heads": "heads"}[name]
        sizes = {key: size for key, size in sizes.items() if key == named or changed.get(key) == size}
    return sizes


def sizes_of(config: PretrainedConfig) -> dict[str, int]:
    """Return the sizes of a config by the planner's names."""
    found = {}
    for key, names in model_config.SIZE_NAMES.items():
        values = [value for name in names if (value := getattr(config, name, None)) is not None]
        numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
        if numbers:
            found[key] = numbers[0]
    kinds = getattr(config, "mlp_layer_types", None) or []
    first = kinds.index("sparse") if "sparse" in kinds else 0
    if first and set(kinds[first:]) == {"sparse"}:  # where a config.json does not list them
        found.setdefault("dense_layers", first)
    return found


def layer_traits(layer: nn.Module, config: PretrainedConfig) -> dict[str, Any]:
    """Return how a layer is made."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    norms = [m for m in layer.modules() if weight_of(m) is not None and weight_of(m).dim() == 1]
    widths = [weight_of(m).numel() for m in norms]
    linear = {name: m for name, m in layer.named_modules() if weight_of(m) is not None and weight_of(m).dim() == 2}
    biased = {name for name, m in linear.items() if getattr(m, "bias", None) is not None}
    attention = {name for name in linear if "attn" in name or "attention" in name}
    out = {name for name in attention if name.rsplit(".", 1)[-1] in OUT}
    feed = [weight_of(m).numel() for name, m in linear.items() if name not in attention]
    expert = [p.dim() == 3 and "gate" in name for name, p in layer.named_parameters()]
    ffn = next((n for n in (getattr(config, key, None) for key in model_config.SIZE_NAMES["ffn"]) if n), 4 * hidden)
    return {
        "gated": any(expert) or sum(feed) >= 3 * hidden * ffn,
        "query_bias": bool(biased & (attention - out)),
        "output_bias": bool(biased & out),
        "ffn_bias": bool(biased - attention),
        "norms": widths.count(hidden),
        "norm_bias": any(getattr(m, "bias", None) is not None for m in norms),
        "head_norms": widths.count(dim) if dim != hidden else 0,
        "wide_norms": any(width not in (hidden, dim) for width in widths),
        "plain_norms": any(is_plain(m) for m, width in zip(norms, widths, strict=True) if width == hidden),
    }


def is_plain(norm: nn.Module) -> bool:
    """Whether a norm is written in single operations that the harness leaves as they are."""
    fuse(norm)
    return not isinstance(norm, nn.LayerNorm) and "forward" not in vars(norm)


OUT = ("o_proj", "out_proj", "dense", "c_proj", "wo", "out", "out_lin")


def outer_traits(model: PreTrainedModel, outside: list[nn.Module], config: PretrainedConfig) -> dict[str, Any]:
    """Return what stands around the layers."""
    weights = [weight_of(module) for module in outside]
    tables = [m for m in outside if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    head = model.get_output_embeddings()
    positions = getattr(config, "max_position_embeddings", 0)
    return {
        "positions": tables[0].num_embeddings - positions if tables else None,
        "outer_norms": sum(weight is not None and weight.dim() == 1 for weight in weights),
        "head_bias": getattr(head, "bias", None) is not None,
        "tied": head is not None and head.weight is model.get_input_embeddings().weight,
    }


def weight_of(module: nn.Module) -> Any:
    """Return a module's own weight, or None."""
    return dict(module.named_parameters(recurse=False)).get("weight")


if __name__ == "__main__":
    main()
