"""Read the shape of a decoder from its config.json alone.

No model is built and no family is named: the usual names of each size (`size_names.json`) are tried in turn.
`families.json` has what a config.json leaves to its family: the structure of its layers, counted on models that
transformers built, and default sizes (`scripts/write_families.py` writes the file).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from harness.config.model.counts import ParameterCounts
from harness.config.model.shape import read_model_config
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.shape import DecoderShape, LayerShape

SIZE_NAMES: dict[str, list[str]] = json.loads(Path(__file__).with_name("size_names.json").read_text(encoding="utf-8"))
NONE_BELOW_0 = ("window", "positions")  # some configs write -1 for no limit
MAIN = ("layers", "hidden", "heads", "ffn", "vocab")  # every config.json has these, perhaps under other names
NEEDED = ("layers", "hidden", "heads", "vocab")
SWITCHES = ("experts", "kv_rank")  # if there are any, a layer has another structure
MOST = 2**40
MOST_LAYERS = 10_000
MOST_OFF = 0.01  # share of a family's parameters; with a larger error, they are counted on its model
DEFAULTS = (
    *("multi_query", "new_decoder_architecture", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq"),
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"),
)
"""Settings that decide the structure of layers; if a config.json lacks one, the family's config class has a default."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The structure of a family's layers, beyond their sizes.

    Attributes:
        gated: the feed-forward network has two input matrices (gate and up) instead of one.
        query_bias, output_bias, ffn_bias: the projections into attention, out of it, and of the feed-forward network
            have biases.
        norms: number of norms over the hidden state in a layer; `norm_bias`: each has a bias.
        head_norms: number of norms over one head's entries; `wide_norms`: over all heads of queries and of keys.
        plain_norms: norms over the hidden state are written in single operations that the harness does not fuse.
        positions: rows of the learned table of positions beyond the longest sequence; None without a table.
        outer_norms: number of norms over the hidden state outside the layers.
        head_bias: whether the head has a bias.
        tied: whether the head is the embedding table, by default.
    """

    gated: bool = True
    query_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    head_norms: int = 0
    wide_norms: bool = False
    plain_norms: bool = False
    positions: int | None = None
    outer_norms: int = 1
    head_bias: bool = False
    tied: bool = True


def _traits(config: Mapping[str, object]) -> Traits:
    """Return the traits of a config's family, changed by the config's own settings."""
    traits = Traits(**_family(config).get("traits", {}))
    stated = {key: value for key, value in config.items() if isinstance(value, bool)}
    changes: dict[str, bool] = {}
    if (bias := stated.get("attention_bias")) is not None and "output_follows_bias" in _family(config):
        changes = {"query_bias": bias, "output_bias": bias and _family(config)["output_follows_bias"]}
    if "mlp_bias" in stated:
        changes["ffn_bias"] = stated["mlp_bias"]
    return replace(traits, **changes, tied=stated.get("tie_word_embeddings", traits.tied))


@cache
def families() -> dict[str, JsonObject]:
    """Return model type -> what is known about that family, from `families.json`."""
    content: dict[str, JsonObject] = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))
    return content


def _family(config: Mapping[str, object]) -> JsonObject:
    return families().get(str(config.get("model_type")), {})


def read_decoder(source: str) -> DecoderShape:
    """Return the shape of a preset, a directory with config.json, or a model type. Raises UserError if it has none."""
    return text_decoder(read_model_config(source), source)


def text_decoder(config: Mapping[str, object], source: str) -> DecoderShape:
    """Return the shape of the text decoder of a model, which may be multimodal; `source` is its name in messages."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    shape = decoder_of({**config, **inner, **tied}, source)
    return replace(shape, guessed=shape.guessed or bool(inner and not tied))  # the whole model's default would decide


class NoSize(UserError):
    """The config.json has no known name for a size of its decoder."""


def decoder_of(config: Mapping[str, object], source: str, counts: ParameterCounts | None = None) -> DecoderShape:
    """Return the shape of a config.json.

    Args:
        source: the model's name in messages.
        counts: the parameters counted on a model that transformers has built; the config may then lack heads.

    Raises UserError for values that are no sizes, and NoSize if a size is missing.
    """
    family = _family(config)
    defaults = {**family.get("sizes", {})}
    is_guess = _is_guess(config)
    if counts is not None:
        defaults = {"layers": len(counts.layers)}
    if "sliding_window" in config:
        defaults["window"] = 0  # null means no window
    config = {**family.get("defaults", {}), **config}
    sizes = {name: _size(config, name, defaults.get(name, 0), source) for name in SIZE_NAMES}
    for name in SWITCHES:  # another program may have written such a key, which a family without experts ignores
        is_guess = is_guess or bool(family and sizes[name] and name not in family["sizes"])
    for name in NEEDED:
        if sizes[name] < 1 and (counts is None or name != "heads"):
            raise NoSize(f"--model {source}: its config.json gives no {SIZE_NAMES[name][0]} above 0: nothing to plan")
    if sizes["hidden"] < sizes["heads"]:
        raise UserError(
            f"--model {source}: its config.json gives {sizes['heads']} attention heads and a width of "
            f"{sizes['hidden']}: no model has that"
        )
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        sizes["kv_heads"] = 1
    traits = _traits(config)
    kinds = [
        [_layer(sizes, traits, is_dense=is_dense, has_window=has_window) for has_window in (False, True)]
        for is_dense in (False, True)
    ]
    rows = sizes["positions"] + traits.positions if traits.positions is not None else 0
    outer = traits.outer_norms * sizes["hidden"] * (2 if traits.norm_bias else 1)
    return DecoderShape(
        layers=tuple(
            kinds[int(_is_dense(config, sizes, index))][int(_has_window(config, sizes, index))]
            for index in range(sizes["layers"])
        ),
        vocab=sizes["vocab"],
        position_rows=rows,
        tied=traits.tied,
        outer_vectors=outer + (sizes["vocab"] if traits.head_bias else 0),
        guessed=is_guess,
    )


def _is_guess(config: Mapping[str, object]) -> bool:
    """Return whether the sizes read here were never compared with a model of this family with these keys.

    If a config.json lacks a main size of its family, it has that size under another name.
    """
    family = _family(config)
    unread = family.get("unread")
    if unread is None or any(config.get(key, usual) != usual for key, usual in unread.items()):
        return True
    if abs(family.get("off", 0.0)) > MOST_OFF:
        return True
    stated = [name for name in MAIN if any(config.get(key) is not None for key in SIZE_NAMES[name])]
    return config.keys() != {"model_type"} and not {*stated} >= {*MAIN} & family["sizes"].keys()


def _is_dense(config: Mapping[str, object], sizes: Mapping[str, int], index: int) -> bool:
    """Return whether a layer has a dense feed-forward network; configs declare layers with experts in several ways."""
    if not sizes["experts"] or index < sizes["dense_layers"]:
        return True
    for key, dense in (("mlp_layer_types", "dense"), ("moe_layer_freq", 0)):
        by_layer = config.get(key)
        if isinstance(by_layer, list) and len(by_layer) == sizes["layers"]:
            return bool(by_layer[index] == dense)
    only_dense = config.get("mlp_only_layers")
    only_sparse = config.get("moe_layers")
    if isinstance(only_dense, list) and index in only_dense:
        return True
    if isinstance(only_sparse, list):
        return index not in only_sparse
    for key in ("decoder_sparse_step", "interleave_moe_layer_step"):
        every = config.get(key)
        if isinstance(every, int) and every > 1 and (index + 1) % every:
            return True
    every = config.get("moe_layer_freq")
    return isinstance(every, int) and every > 1 and index % every > 0


def _has_window(config: Mapping[str, object], sizes: Mapping[str, int], index: int) -> bool:
    """Return whether a layer attends only to a window, if the config has one."""
    if config.get("use_sliding_window") is False:
        return False
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == sizes["layers"]:
        return bool(kinds[index] == "sliding_attention")
    first = config.get("max_window_layers")
    if config.get("use_sliding_window") is True and isinstance(first, int):
        return index >= first
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        every = config.get(key)
        if isinstance(every, int) and every > 1:
            return (index + 1) % every > 0
    return True


def _layer(sizes: Mapping[str, int], traits: Traits, *, is_dense: bool, has_window: bool) -> LayerShape:
    """Return a layer, with a dense feed-forward network or with experts."""
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    kv_heads = sizes["kv_heads"] or heads
    head_dim = (sizes["head_dim"] or hidden // heads) if heads else 0
    query = heads * head_dim
    key = kv_heads * head_dim
    value = kv_heads * head_dim
    if sizes["kv_rank"]:
        query = key = heads * (sizes["nope_dim"] + sizes["rope_dim"])
        value = heads * sizes["value_dim"]
    ffn = sizes["ffn"] or 4 * hidden
    expert_ffn = sizes["expert_ffn"] or ffn
    shape = LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=heads if sizes["kv_rank"] else kv_heads,
        query=query,
        key=key,
        value=value,
        output=value if sizes["kv_rank"] else query,
        q_rank=sizes["q_rank"] if sizes["kv_rank"] else 0,
        kv_rank=sizes["kv_rank"],
        rope=sizes["rope_dim"] if sizes["kv_rank"] else 0,
        ffn=ffn if is_dense else 0,
        gated=traits.gated,
        experts=0 if is_dense else sizes["experts"],
        top_k=0 if is_dense else max(1, min(sizes["top_k"], sizes["experts"])),
        expert_ffn=0 if is_dense else expert_ffn,
        shared_ffn=0 if is_dense else sizes["shared_ffn"] or sizes["shared_experts"] * expert_ffn,
        window=sizes["window"] if has_window else 0,
        norms=traits.norms,
        plain_norms=traits.plain_norms,
        native_norms=traits.norm_bias,  # RMS norms have none
    )
    return replace(shape, vectors=_vectors(shape, traits, head_dim))


def _vectors(shape: LayerShape, traits: Traits, head_dim: int) -> int:
    """Return the number of elements of a layer's norms and biases."""
    norms = traits.norms * shape.hidden * (2 if traits.norm_bias else 1) + traits.head_norms * head_dim
    norms += shape.q_rank + shape.kv_rank + (shape.query + shape.key if traits.wide_norms else 0)
    biases = (shape.query + shape.key + shape.value if traits.query_bias else 0) + (
        shape.hidden if traits.output_bias else 0
    )
    if traits.ffn_bias and shape.ffn:
        biases += shape.into_ffn * shape.ffn + shape.hidden
    return norms + biases


def _size(config: Mapping[str, object], size: str, default: int, source: str) -> int:
    """Return the first number under the names of a size, or the default if there is none.

    Of a list with a number for each layer, take the largest. Raises UserError for a value that is no size: with the
    default instead, another model would be planned.
    """
    most = MOST_LAYERS if size == "layers" else MOST
    is_none = False
    for name in SIZE_NAMES[size]:
        value = config.get(name)
        if isinstance(value, list) and value and all(_is_whole(one) for one in value):
            return int(max(value))
        if value is None or isinstance(value, (list, Mapping)):
            is_none = is_none or name in config
            continue
        if isinstance(value, int) and _is_whole(value) and (0 <= value <= most or (value < 0 and size in NONE_BELOW_0)):
            return max(0, value)
        shown = json.dumps(value)
        raise UserError(
            f"--model {source}: {name} is {shown} in its config.json: write a whole number from 0 to {most:,}"
        )
    return 0 if is_none and size in NEEDED else default


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
