"""What a decoder layer gives besides its hidden state: further outputs, and what it puts into mappings it is given.

A model may pass such things to a later layer (keys and values, indices). A `LayerOutputSpec` names each tensor among
them, so that it can be taken from the layer on one stage and put in the same place on another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from harness.errors import UserError
from harness.hf.layers.dry_run import dry_run
from harness.hf.layers.inputs import LayerInputs, LayerOutput

Contents: TypeAlias = dict[int | str, dict[Hashable, object]]
"""What the mappings among a layer's arguments hold, by the place of the argument."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A value that a layer puts under `key` into the mapping that is its argument `place`."""

    place: int | str
    key: Hashable
    name: str
    leaves: list[object]
    spec: TreeSpec


@dataclass(frozen=True, kw_only=True)
class LayerOutputSpec:
    """The structure of what one layer gives.

    Attributes:
        name: of the layer, with which the names of its tensors begin.
        extras: what it returns after the hidden state, flat; tensors are on the meta device. None: a bare hidden state.
        spec: how `extras` are nested.
        effects: what it puts into mappings.
    """

    name: str
    extras: list[object] | None
    spec: TreeSpec | None
    effects: tuple[Effect, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor on meta of everything but the hidden state."""
        named = _named(f"{self.name}.output", self.extras or [])
        for effect in self.effects:
            named |= _named(effect.name, effect.leaves)
        return {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}

    def renamed(self, name: str) -> LayerOutputSpec:
        """Return the same for another layer."""
        effects = tuple(replace(e, name=name + e.name.removeprefix(self.name)) for e in self.effects)
        return replace(self, name=name, effects=effects)

    def output(self, hidden: Tensor, known: Mapping[str, Tensor]) -> LayerOutput:
        """Return the layer's output, made of a hidden state and the tensors in `known`; all others are None."""
        if self.extras is None or self.spec is None:
            return hidden
        leaves = [known.get(name) for name in _named(f"{self.name}.output", self.extras)]
        return hidden, *tree_unflatten(leaves, self.spec)

    def affect(self, inputs: LayerInputs, known: Mapping[str, Tensor]) -> None:
        """Put into the mappings of `inputs` what the layer would put there, as far as it is in `known`."""
        for effect in self.effects:
            leaves = [known.get(name) for name in _named(effect.name, effect.leaves)]
            if all(leaf is not None for leaf in leaves):
                inputs.argument(effect.place)[effect.key] = tree_unflatten(leaves, effect.spec)

    def take(self, inputs: LayerInputs, output: LayerOutput) -> dict[str, Tensor]:
        """Return the tensors, by name, that the layer gave: it returned `output` when it was given `inputs`."""
        found: dict[str, object] = {}
        if self.extras is not None:
            found |= _named(f"{self.name}.output", tree_flatten(tuple(output[1:]))[0])
        for effect in self.effects:
            found |= _named(effect.name, tree_flatten(inputs.argument(effect.place)[effect.key])[0])
        return {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}


def kind_of(layer: nn.Module) -> Hashable:
    """Return a value that is equal for layers whose outputs have one structure.

    These have equal modules, shapes and settings, but for numbers such as their index.
    """

    def settings(module: nn.Module) -> tuple[tuple[str, bool | str], ...]:
        return tuple(sorted((key, value) for key, value in vars(module).items() if isinstance(value, (bool, str))))

    modules = tuple((name, type(module), settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


@torch.no_grad()
def output_spec_of(name: str, layer: nn.Module, inputs: LayerInputs, hidden: Tensor) -> LayerOutputSpec:
    """Run a layer of the meta device on `inputs`, and return what it gives besides the hidden state.

    Raises UserError if it does not return a hidden state first, or appends to a list that it is given.
    """

    def run(module: nn.Module, passed: LayerInputs, state: Tensor) -> tuple[LayerOutput, LayerInputs, Contents]:
        before = _contents(passed)
        return passed.apply(module, state), passed, before

    output, passed, before = dry_run(layer, inputs, hidden, run)
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor) or first.shape != hidden.shape:
        raise UserError(
            f"{type(layer).__name__} does not return a hidden state first, so it cannot be split into stages"
        )
    extras, spec = tree_flatten(tuple(output[1:])) if isinstance(output, (tuple, list)) else (None, None)
    effects = tuple(_effects(name, layer, inputs, passed, before))
    return LayerOutputSpec(name=name, extras=extras, spec=spec, effects=effects)


def _contents(inputs: LayerInputs) -> Contents:
    return {place: dict(value) for place, value in inputs.arguments().items() if isinstance(value, MutableMapping)}


def _effects(
    name: str, layer: nn.Module, inputs: LayerInputs, passed: LayerInputs, before: Contents
) -> Iterator[Effect]:
    for place, value in passed.arguments().items():
        given = inputs.argument(place)
        if isinstance(value, list) and len(value) != len(given):
            raise UserError(
                f"{type(layer).__name__} appends to a list shared with other layers, so it cannot be split into stages"
            )
        if not isinstance(value, MutableMapping):
            continue
        for key in value:
            if key not in before[place] or value[key] is not before[place][key]:
                leaves, spec = tree_flatten(value[key])
                yield Effect(place=place, key=key, name=f"{name}.{place}.{key}", leaves=leaves, spec=spec)


def _named(prefix: str, leaves: list[object]) -> dict[str, object]:
    return {f"{prefix}.{index}": leaf for index, leaf in enumerate(leaves)}
