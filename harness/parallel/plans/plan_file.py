"""Plan files: `models/plans/<model_type>.json`, for families that declare no tensor-parallel plan.

    {"styles":     {"transformer.h.*.attn.c_attn": {"style": "packed_colwise", "parts": 3},
                    "transformer.h.*.attn.c_proj": "rowwise"},
     "attributes": {"transformer.h.*.attn": {"num_heads": "divide"}},
     "inputs":     {"transformer.h.*": {"alibi": {"dim": 0, "run": "num_attention_heads"}}},
     "cases":      [{"if": {"multi_query": true}, "styles": {...}},
                    {"if": {"qk_layernorm": true}, "refuse": "its heads' norms are a list"}]}

`styles` are those of `harness.parallel.plans.plan.STYLES`, alone or with a rule's other fields, by module or parameter
name,
`*` for a number; a null takes a style away. `attributes` are sizes which a module's forward reads and which shrink with
its weights: "divide" for what a rank holds of them, or a "share", which is one where there are fewer (key/value heads)
than ranks, or a sum of products of what the others have become, as in "num_heads * head_dim + 2 * n_groups". One of a
config that modules share, "config.num_heads", is changed for this module alone. `inputs` are tensors, given to a
module, of which a rank needs its part: dimension `dim` is made of runs of `run` entries (a size in the config; without
it, one run), of each of which the rank keeps its share. `cases` are laid over the rest, in their order, where all the
config's fields that they name have the values that they name. A file with `"extends": true` says only what the plan of
a family that declares one leaves out or says wrongly.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PretrainedConfig

from harness.config.values.json_object import JsonObject
from harness.errors import UserError

_PARTS = ("styles", "attributes", "inputs")
WORDS = frozenset({"divide", "share"})


def read_parts(path: Path, config: PretrainedConfig) -> JsonObject:
    """Return what a plan file says of a model with `config`, as JSON has it: styles, attributes and inputs, and
    whether they extend the model's own plan.

    Raises ValueError, KeyError or TypeError where the file is no plan, UserError where it refuses such a model.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    unknown = set(data) - {*_PARTS, "cases", "note", "extends"}
    if unknown:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
    parts: JsonObject = {"styles": dict(data["styles"])}
    parts |= {name: dict(data.get(name, {})) for name in _PARTS[1:]}
    for case in data.get("cases", []):
        if all(getattr(config, field) == value for field, value in case["if"].items()):
            if "refuse" in case:
                raise UserError(
                    f"model type {path.stem!r} cannot be cut for tensor parallelism with "
                    f"{', '.join(f'{field} {value}' for field, value in case['if'].items())}: {case['refuse']}: "
                    "set tensor_parallel.autotp_size to 1"
                )
            for name in _PARTS:
                parts[name] |= case.get(name, {})
    parts["styles"] = {name: rule for name, rule in parts["styles"].items() if rule is not None}
    for name, words in parts["attributes"].items():
        _require_words(name, words)
    return {**parts, "extends": data.get("extends", False)}


def _require_words(name: str, words: dict[str, str]) -> None:
    for attribute, word in words.items():
        if word not in WORDS and not set(word) & set("+*"):
            raise ValueError(
                f"{name}: attribute {attribute} is {word!r}: use {' or '.join(sorted(WORDS))}, or a sum of products"
            )
