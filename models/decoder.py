"""A HuggingFace causal decoder as a list of pipeline layers, with HuggingFace's own modules inside.

The list is: one `Prologue` (token ids -> hidden state), one `DecoderLayer` for each layer of the model (hidden
state -> hidden state), one `Epilogue` (hidden state -> logits). What belongs where is found by the model's own
forward (`frame.py`). Each holds its modules under their names in the model, so that the pipeline name of a
parameter is the index of its layer followed by its HuggingFace name: `3.model.layers.2.self_attn.q_proj.weight`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from harness.models.frame import Frame
from harness.models.weights import WeightSource, materialise
from harness.parallel.adapters import is_wrapper

TIE = "tied"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What every layer of a model is built with.

    Attributes:
        frame: the model's forward.
        cut: cuts a layer's modules, on meta, for this rank's place in the tensor-parallel group.
        source: fills the weights.
        device, dtype: of the parameters.
        finish: called with each layer once its weights are in place (ZeRO-3 partitions them there).
    """

    frame: Frame
    cut: Callable[[nn.Module], None]
    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    finish: Callable[[nn.Module], None]


class ModelLayer(nn.Module):
    """A pipeline layer that holds modules of the model under their own names.

    Args:
        blueprint: how it is built.
        modules: name in the model -> module on meta.
    """

    recompute = False

    def __init__(self, blueprint: Blueprint, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # a copy: the frame's own modules stay whole and on meta, so that a layer can be built once more
        for name, module in copy.deepcopy(dict(modules)).items():
            _nest(self, name, module)
        whole = copy.deepcopy(self)
        blueprint.cut(self)
        materialise(self, blueprint.device, blueprint.dtype)
        blueprint.source.fill(self, whole)
        blueprint.finish(self)
        self.frame = blueprint.frame


class Prologue(ModelLayer):
    """Token ids [batch, sequence] -> hidden state [batch, sequence, width]."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint, blueprint.frame.prologue)
        self.names = list(blueprint.frame.prologue)

    def forward(self, ids: Tensor) -> Tensor:
        modules = {name: self.get_submodule(name) for name in self.names}
        return self.frame.enter(ids, modules, self.training)


class DecoderLayer(ModelLayer):
    """One decoder layer: hidden state -> hidden state, both [batch, sequence, width]."""

    recompute = True

    def __init__(self, blueprint: Blueprint, index: int) -> None:
        self_name = blueprint.frame.layer_names[index]
        super().__init__(blueprint, {self_name: blueprint.frame.layers[index]})
        self.index = index
        self.name = self_name

    def forward(self, hidden: Tensor) -> Tensor:
        output = self.frame.notes(self.index, hidden).apply(self.get_submodule(self.name), hidden)
        return output[0] if isinstance(output, (tuple, list)) else output


class Epilogue(ModelLayer):
    """Hidden state [batch, sequence, width] -> logits [batch, sequence, vocabulary or this rank's part of it]."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint, blueprint.frame.epilogue)
        self.names = list(blueprint.frame.epilogue)

    def forward(self, hidden: Tensor) -> Tensor:
        modules = {name: self.get_submodule(name) for name in self.names}
        return self.frame.leave(hidden, modules, self.training)


def decoder_layers(blueprint: Blueprint) -> list[LayerSpec]:
    """The model's pipeline layers; prologue and epilogue are tied where the model ties their weights."""
    frame = blueprint.frame
    middle = [LayerSpec(DecoderLayer, blueprint, index) for index in range(len(frame.layers))]
    ties = tied_names(frame)
    if not ties:
        return [LayerSpec(Prologue, blueprint), *middle, LayerSpec(Epilogue, blueprint)]
    first, last = map(list, zip(*ties, strict=True))
    return [
        TiedLayerSpec(TIE, Prologue, blueprint, tied_weight_attr=first),
        *middle,
        TiedLayerSpec(TIE, Epilogue, blueprint, tied_weight_attr=last),
    ]


def tied_names(frame: Frame) -> list[tuple[str, str]]:
    """The names in prologue and epilogue of each parameter that is one and the same in the model."""
    before = {id(parameter): name for name, parameter in _named(frame.prologue)}
    return [(before[id(parameter)], name) for name, parameter in _named(frame.epilogue) if id(parameter) in before]


def _named(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{prefix}.{name}", parameter)
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters(recurse=is_wrapper(module))
    ]


def _nest(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` under its dotted name, with bare modules for the parts of the path."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(leaf, module)
