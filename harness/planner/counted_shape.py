"""Correct a decoder's shape by the parameters counted on the model itself.

The planner reads sizes from config.json by their usual names (`model_config.py`). If that was never compared with a
model for a family or key, transformers builds the model, in a process of its own because the planner itself runs
without torch.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from harness.config.model.counts import LayerCounts, ParameterCounts
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.model_config import NoSize, decoder_of, text_decoder
from harness.planner.shape import DecoderShape, LayerShape
from harness.topology.processes import own_python

MODULE = "harness.hf.counts"
LIMIT_S = 120.0


def counted_decoder(config: Mapping[str, object], source: str) -> tuple[Mapping[str, object], DecoderShape, str]:
    """Return a model's config (with its family's defaults, if transformers built the model), its shape, and a doubt.

    The doubt is the reason why the number of parameters is a guess; "" if it is none. Raises UserError for a config
    without sizes.
    """
    family = str(config.get("model_type"))
    shape, lack = None, ""
    try:
        shape = text_decoder(config, source)
    except NoSize as error:  # transformers may know the sizes, from the model type alone or under other names
        lack = str(error)
    if shape is not None and not shape.guessed:
        return config, shape, ""
    try:
        config, counts = _asked(config)
    except UserError as error:
        if shape is None:
            raise UserError(f"{lack}, and {error}") from None
        return config, shape, f"the planner does not know how this {family} is made, and {error}"
    return config, with_counts(decoder_of(config, source, counts), counts), ""


def _asked(config: Mapping[str, object]) -> tuple[Mapping[str, object], ParameterCounts]:
    """Return a config with its family's defaults, and the parameter counts of the model that transformers builds.

    Raises UserError if transformers cannot build it.
    """
    if not isinstance(config.get("model_type"), str):
        raise UserError("it names no model_type, by which transformers would know it")
    try:
        said = subprocess.run(
            own_python("-m", MODULE), input=json.dumps(config), capture_output=True, text=True, timeout=LIMIT_S
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
    """Return the shape with the counted number of parameters in each layer and outside of them.

    Sizes from the config stay; parameters that they do not explain count as further matrices of the layer.
    """
    kinds: dict[tuple[LayerCounts, LayerShape], LayerShape] = {}
    layers = []
    for index, own in enumerate(counts.layers):
        read = _like(shape, index, own.experts > 0)
        if (own, read) not in kinds:
            kinds[own, read] = _counted_layer(own, read)
        layers.append(kinds[own, read])
    plain = replace(shape, layers=tuple(layers), tied=counts.tied, outer_vectors=0)
    return replace(plain, outer_vectors=counts.total - plain.parameters, guessed=False)


def _like(shape: DecoderShape, index: int, has_experts: bool) -> LayerShape:
    """Return the shape read for layer `index`; if that differs in having experts, of the first layer that does not."""
    same = shape.layers[min(index, len(shape.layers) - 1)]
    if bool(same.experts) == has_experts:
        return same
    other = next((layer for layer in shape.layers if bool(layer.experts) == has_experts), None)
    return other or replace(same, ffn=same.ffn or same.shared_ffn + same.top_k * same.expert_ffn)


def _counted_layer(own: LayerCounts, layer: LayerShape) -> LayerShape:
    """Return `layer`, as read from the config, with the counted parameters of `own`."""
    if not own.experts:
        layer = replace(layer, experts=0, top_k=0, expert_ffn=0, shared_ffn=0)
    elif layer.experts:
        layer = replace(layer, expert_ffn=own.experts // (layer.experts * (layer.into_ffn + 1) * layer.hidden))
    more = own.matrices + own.experts - layer.matrix_parameters
    if more < 0:  # the model has fewer parameters than the sizes of its config explain
        each = (layer.into_ffn + 1) * layer.hidden
        layer = replace(layer, ffn=max(0, layer.ffn + more // each))
        more = own.matrices + own.experts - layer.matrix_parameters
    return replace(layer, more=more, vectors=own.vectors)
