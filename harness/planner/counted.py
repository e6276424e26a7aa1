"""A decoder's shape, held to the parameters that were counted on the model itself.

The planner reads sizes from config.json by their usual names. Where nobody has held what it reads of a family, or of a
key, against a model, transformers is asked to build one, in a process of its own: the planner itself needs no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

from harness.config.model.counts import LayerCounts, ParameterCounts
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.model_config import families, text_decoder
from harness.planner.shape import DecoderShape, LayerShape

MODULE = "harness.hf.counts"
LIMIT_S = 120.0
MOST_OFF = 0.01  # share of the parameters that may stay unexplained


def counted_decoder(config: Mapping[str, object], source: str) -> tuple[Mapping[str, object], DecoderShape, str]:
    """Return a model's config, with its family's defaults where they were asked for, its shape, and what is doubtful.

    Doubtful is why its number of parameters is a guess, else nothing. UserError for a config without sizes.
    """
    family = str(config.get("model_type"))
    is_bare = len(config) == 1 and family not in families()  # a model type alone, whose defaults are not known here
    shape = None if is_bare else text_decoder(config, source)
    if shape is not None and not shape.guessed:
        return config, shape, ""
    try:
        config, counts = _asked(config)
    except UserError as error:
        if shape is None:
            raise UserError(f"--model {source}: nothing to plan: {error}") from None
        return config, shape, f"the planner does not know how this {family} is made, and {error}"
    shape = with_counts(text_decoder(config, source), counts)
    doubt = "its sizes explain another number of parameters than transformers builds"
    return config, shape, doubt if shape.guessed else ""


def _asked(config: Mapping[str, object]) -> tuple[Mapping[str, object], ParameterCounts]:
    """Return a config with its family's defaults, and the counts of the model that transformers builds of it.

    UserError where it cannot.
    """
    try:
        said = subprocess.run(
            [sys.executable, "-m", MODULE], input=json.dumps(config), capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"transformers did not build it within {LIMIT_S:g} s") from None
    if said.returncode:
        reason = (said.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"transformers does not build it: {reason}")
    found: JsonObject = json.loads(said.stdout.splitlines()[-1])
    counts = found["counts"]
    layers = tuple(LayerCounts(**layer) for layer in counts["layers"])
    return found["config"], ParameterCounts(layers=layers, total=counts["total"], tied=counts["tied"])


def with_counts(shape: DecoderShape, counts: ParameterCounts) -> DecoderShape:
    """Return the shape with as many parameters in each layer, and around them, as the model has.

    Sizes that its config names stay; what they do not explain is counted as other matrices of the layer.
    """
    kinds: dict[tuple[LayerCounts, LayerShape], LayerShape] = {}
    layers = []
    for index, own in enumerate(counts.layers):
        read = _like(shape, index, own.experts > 0)
        if (own, read) not in kinds:
            kinds[own, read] = _counted_layer(own, read)
        layers.append(kinds[own, read])
    plain = replace(shape, layers=tuple(layers), tied=counts.tied, outer_vectors=0)
    found = replace(plain, outer_vectors=max(0, counts.total - plain.parameters))
    return replace(found, guessed=abs(found.parameters / counts.total - 1) > MOST_OFF)


def _like(shape: DecoderShape, index: int, has_experts: bool) -> LayerShape:
    """Return what was read of a layer, or of the first that has experts, or none, as it does."""
    same = shape.layers[min(index, len(shape.layers) - 1)]
    if bool(same.experts) == has_experts:
        return same
    other = next((layer for layer in shape.layers if bool(layer.experts) == has_experts), None)
    return other or replace(same, ffn=same.ffn or same.shared_ffn + same.top_k * same.expert_ffn)


def _counted_layer(own: LayerCounts, layer: LayerShape) -> LayerShape:
    """Return a layer with the parameters of `own`; `layer` is what its config says of it."""
    if not own.experts:
        layer = replace(layer, experts=0, top_k=0, expert_ffn=0, shared_ffn=0)
    elif layer.experts:
        layer = replace(layer, expert_ffn=own.experts // (layer.experts * (layer.into_ffn + 1) * layer.hidden))
    more = own.matrices + own.experts - layer.matrix_parameters
    if more < 0:  # it has less than its config's sizes say
        each = (layer.into_ffn + 1) * layer.hidden
        layer = replace(layer, ffn=max(0, layer.ffn + more // each))
        more = own.matrices + own.experts - layer.matrix_parameters
    return replace(layer, more=more, vectors=own.vectors)
