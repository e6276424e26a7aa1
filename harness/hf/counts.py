"""Count the parameters of a decoder on the model itself, built on the meta device, where it takes no memory.

`python -m harness.hf.counts` reads a config.json from standard input and prints as JSON the counts, and the config with
all defaults of its family. `ds-harness plan` runs it as a process, so that it need not import torch itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from harness.config.model.counts import LayerCounts, ParameterCounts
from harness.config.values.json_object import JsonObject
from harness.errors import UserError, headline, text_of
from harness.hf.forward.placeholders import find_stack
from harness.hf.skeleton import build_skeleton, text_decoder

USUAL_NAMES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads"),
)
_COUNTED: dict[tuple[type[PretrainedConfig], str], ParameterCounts] = {}


def counts_of(config: PretrainedConfig) -> ParameterCounts:
    """Return the counts of the model that transformers builds from a config. Raises UserError as `parameter_counts`.

    The result is cached: a process may train one model in many layouts, and building a skeleton delays each start.
    """
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _COUNTED:
        _COUNTED[key] = parameter_counts(build_skeleton(config))
    return _COUNTED[key]


def parameter_counts(model: PreTrainedModel) -> ParameterCounts:
    """Return the counts of a model on any device. Raises UserError if it has no list of decoder layers.

    A parameter that several layers share counts in the first of them.
    """
    text = model.config.get_text_config(decoder=True).to_dict()
    seen: set[int] = set()
    layers = tuple(_layer_counts(layer, text, seen) for layer in model.get_submodule(find_stack(model)).children())
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    return ParameterCounts(
        layers=layers,
        total=sum(parameter.numel() for parameter in model.parameters()),
        tied=head is not None and getattr(head, "weight", None) is getattr(table, "weight", head),
    )


def _layer_counts(layer: nn.Module, text: Mapping[str, Any], seen: set[int]) -> LayerCounts:
    found = {"matrices": 0, "experts": 0, "vectors": 0}
    routed = _routed(layer, {value for key, value in text.items() if "experts" in key and isinstance(value, int)})
    for parameter in layer.parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        kind = "matrices" if parameter.dim() > 1 else "vectors"
        if id(parameter) in routed:
            kind = "experts"
        found[kind] += parameter.numel()
    return LayerCounts(**found)


def _routed(layer: nn.Module, sizes: set[int]) -> set[int]:
    """Return the ids of parameters of routed experts: tensors with one row per expert, or lists of that length."""
    tensors = {id(p) for p in layer.parameters() if p.dim() == 3 and len(p) > 1 and len(p) in sizes}
    lists = [m for m in layer.modules() if isinstance(m, nn.ModuleList) and len(m) > 1 and len(m) in sizes]
    return tensors | {id(p) for one in lists for p in one.parameters()}


def read_config(content: Mapping[str, Any]) -> PretrainedConfig:
    """Return the text decoder's config from a config.json's content. Raises UserError if it cannot be read."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # only transformers' reader of files decodes infinity
            (Path(folder) / "config.json").write_text(json.dumps(content), encoding="utf-8")
            config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # a family's config class may check its fields as it likes
        raise UserError(f"transformers cannot read its config.json: {text_of(error).partition('. ')[0]}") from error
    return text_decoder(config)


def main() -> int:
    """Print the counts of the config.json on standard input; if there are none, print the reason and exit with 1."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    try:
        config, counts = config_and_counts(json.load(sys.stdin))
    except UserError as error:
        print(headline(error), file=sys.stderr)
        return 1
    print(json.dumps({"config": config, "counts": asdict(counts)}))
    return 0


def config_and_counts(content: Mapping[str, Any]) -> tuple[JsonObject, ParameterCounts]:
    """Return a config.json's content with all defaults, and the counts of its model.

    Sizes are also added under the names that most families use. Raises UserError if transformers cannot build it.
    """
    config = read_config(content)
    return _with_usual_names(config), parameter_counts(build_skeleton(config))


def _with_usual_names(config: PretrainedConfig) -> JsonObject:
    found: JsonObject = json.loads(config.to_json_string(use_diff=False))
    usual = {name: getattr(config, name, None) for name in USUAL_NAMES}
    return {**found, **{name: value for name, value in usual.items() if type(value) is int}}


if __name__ == "__main__":
    sys.exit(main())
