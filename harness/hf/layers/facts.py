"""What dry runs show about a model's decoder layers, found once for all layers that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from harness.hf.layers.dry_run import META, drawn_shapes
from harness.hf.layers.inputs import LayerInputs
from harness.hf.layers.outputs import LayerOutputSpec, kind_of, output_spec_of
from harness.hf.layers.zero3_leaves import leaves_of


class LayerFacts:
    """What the layers give, draw, and let ZeRO-3 gather.

    Args:
        layers: the decoder layers, whole and on the meta device.
        names: their names in the model.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._layers = layers
        self._names = names
        self._output_specs: dict[int, LayerOutputSpec] = {}
        self._output_specs_by_kind: dict[Hashable, LayerOutputSpec] = {}
        self._examples: dict[Hashable, tuple[LayerInputs, Tensor]] = {}
        self._leaves: dict[Hashable, frozenset[str]] = {}
        self._drawn_shapes: dict[tuple[int, torch.Size], list[torch.Size]] = {}

    def output_spec(self, index: int) -> LayerOutputSpec:
        """Return what layer `index` gives besides the hidden state; it must have been observed."""
        return self._output_specs[index]

    def observe(self, index: int, inputs: LayerInputs, hidden: Tensor) -> LayerOutputSpec:
        """Return what layer `index`, given this, gives besides the hidden state; found at its first call."""
        if index not in self._output_specs:
            layer, name = self._layers[index], self._names[index]
            kind = kind_of(layer)  # once for all that are alike: one that looks at values takes a second
            if kind not in self._output_specs_by_kind:
                self._output_specs_by_kind[kind] = output_spec_of(name, layer, inputs, hidden)
                self._examples[kind] = inputs, hidden
            self._output_specs[index] = self._output_specs_by_kind[kind].renamed(name)
        return self._output_specs[index]

    def drawn_shapes(self, index: int, inputs: LayerInputs, hidden: Tensor) -> list[torch.Size]:
        """Return the shapes of what layer `index`, uncut, draws when it is given this."""
        key = index, hidden.shape
        if key not in self._drawn_shapes:
            self._drawn_shapes[key] = drawn_shapes(self._layers[index], inputs, hidden)
        return self._drawn_shapes[key]

    def zero3_leaves(self, index: int) -> frozenset[str]:
        """Return the names, within layer `index`, of the modules that ZeRO-3 must gather as one."""
        layer = self._layers[index]
        kind = kind_of(layer)
        if kind not in self._leaves:
            inputs, hidden = self._examples[kind]
            inputs, hidden = inputs.mapped(lambda tensor: tensor.to(META)), hidden.to(META)
            self._leaves[kind] = leaves_of(layer, lambda watched: inputs.apply(watched, hidden))
        return self._leaves[kind]
