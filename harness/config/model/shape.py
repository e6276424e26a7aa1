"""Read from a config.json alone the sizes of a model that decide whether a layout fits it.

No model is built and no family is named: the usual names of each size are tried in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.config.model.facts import EXPERTS, layer_drop, require_countable
from harness.config.model.hub import cached
from harness.config.model.plans import MODELS, expert_plan_refusal, families_of_matrix, plan_refusal
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import whole
from harness.errors import UserError

PRESETS = MODELS / "presets"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INTERMEDIATE = (
    "moe_intermediate_size",
    "intermediate_size",
    "ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "n_inner",
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; None if its config does not have one.

    `plan_refusal` is the reason why it cannot be cut for tensor parallelism, and `expert_plan_refusal` why its experts
    cannot be distributed whole; None if no reason is known.
    """

    name: str
    layers: int | None
    heads: int | None
    kv_heads: int | None
    hidden: int | None
    intermediate: int | None
    experts: int | None
    vocabulary: int | None
    plan_refusal: str | None = None
    expert_plan_refusal: str | None = None
    layerdrop: float = 0.0  # probability of a layer to be skipped in training
    window: int | None = None  # tokens that some layers see at most, fewer than the model has positions


def read_model_config(source: str) -> JsonObject:
    """Return the config.json of a preset, a directory or a file; for a model type, the values known for its family.

    Raises UserError if there is none.
    """
    preset = PRESETS / source / "config.json"
    path = preset if preset.is_file() else (cached(source) or Path(source))
    path = path / "config.json" if path.is_dir() else path
    try:
        config = {"model_type": source} if is_model_type(source) else read_json(path)
    except (OSError, ValueError):
        names = ", ".join(sorted(p.parent.name for p in PRESETS.glob("*/config.json"))) or "none"
        hint = f"name a directory with config.json, a model type, a preset ({names}), or an id of the hub after "
        hint += "`hf download ID config.json`"
        raise UserError(f"--model {source}: no readable config.json; {hint}") from None
    if not isinstance(config, dict):
        raise UserError(f"--model {source}: config.json is not an object")
    if not isinstance(config.get("model_type", ""), str):
        raise UserError(f"--model {source}: model_type in its config.json is not a text: correct it")
    require_countable(config, f"--model {source}: config.json")
    return config


def is_model_type(source: str) -> bool:
    """Return whether `source` is only a model type, without a config.json."""
    return source in families_of_matrix() and not (PRESETS / source).exists() and not Path(source).exists()


def read_shape(source: str) -> ModelShape:
    """Read the shape of a model; `source` and errors are those of `read_model_config`."""
    config = read_model_config(source)
    refusals = {"plan_refusal": plan_refusal(config), "expert_plan_refusal": expert_plan_refusal(config)}
    text = config.get("text_config", config)
    config = config | text if isinstance(text, dict) else config
    return ModelShape(
        name=source,
        layers=_first(config, _LAYERS),
        heads=_first(config, _HEADS),
        kv_heads=_first(config, _KV_HEADS),
        hidden=_first(config, _HIDDEN),
        intermediate=_first(config, _INTERMEDIATE),
        experts=_first(config, EXPERTS),
        vocabulary=_first(config, ("vocab_size",)),
        layerdrop=layer_drop(config),
        window=_window(config),
        **refusals,
    )


def _window(config: JsonObject) -> int | None:
    window = whole(config.get("sliding_window"))
    positions = whole(config.get("max_position_embeddings"))
    if window is None or config.get("use_sliding_window") is False or (positions is not None and positions <= window):
        return None
    return window


def _first(config: JsonObject, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
