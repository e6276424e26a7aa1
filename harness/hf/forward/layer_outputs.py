"""What a decoder layer gives besides its hidden state: further outputs, and what it puts into mappings handed to it.

A model may hand such things to a later layer (keys and values, indices). A `LayerOutputSpec` names each tensor among
them, so that it can be taken from the layer on one stage and put in the same place on another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from harness.errors import UserError
from harness.hf.forward.dry_run import dry_run
from harness.hf.forward.layer_inputs import LayerInputs


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A value that a layer puts under `key` into the mapping that is its argument `place`."""

    place: int | str
    key: Any
    name: str
    leaves: list[Any]
    spec: TreeSpec


@dataclass(frozen=True, kw_only=True)
class LayerOutputSpec:
    """The form of what one layer gives.

    Attributes:
        name: of the layer, with which the names of its tensors begin.
        extras: what it returns after the hidden state, flat; tensors are on the meta device. None: a bare hidden state.
        spec: how `extras` are nested.
        effects: what it puts into mappings.
    """

    name: str
    extras: list[Any] | None
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
        """The same of another layer."""
        effects = tuple(replace(e, name=name + e.name.removeprefix(self.name)) for e in self.effects)
        return replace(self, name=name, effects=effects)

    def output(self, hidden: Tensor, given: Mapping[str, Tensor]) -> Any:
        """The layer's output made of a hidden state and the tensors in `given`; the others are None."""
        if self.extras is None or self.spec is None:
            return hidden
        leaves = [given.get(name) for name in _named(f"{self.name}.output", self.extras)]
        return hidden, *tree_unflatten(leaves, self.spec)

    def affect(self, call: LayerInputs, given: Mapping[str, Tensor]) -> None:
        """Put into the mappings of `call` what the layer would put there, as far as it is in `given`."""
        for effect in self.effects:
            leaves = [given.get(name) for name in _named(effect.name, effect.leaves)]
            if all(leaf is not None for leaf in leaves):
                call.argument(effect.place)[effect.key] = tree_unflatten(leaves, effect.spec)

    def take(self, call: LayerInputs, output: Any) -> dict[str, Tensor]:
        """The tensors that the layer gave: `output` is what `call` returned."""
        found: dict[str, Any] = {}
        if self.extras is not None:
            found |= _named(f"{self.name}.output", tree_flatten(tuple(output[1:]))[0])
        for effect in self.effects:
            found |= _named(effect.name, tree_flatten(call.argument(effect.place)[effect.key])[0])
        return {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}


def kind_of(layer: nn.Module) -> Hashable:
    """Equal for layers that give alike: of equal modules, shapes and settings, but for numbers such as their index."""

    def settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
        return tuple(sorted((key, value) for key, value in vars(module).items() if isinstance(value, (bool, str))))

    modules = tuple((name, type(module), settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


@torch.no_grad()
def outline_of(name: str, layer: nn.Module, call: LayerInputs, hidden: Tensor) -> LayerOutputSpec:
    """Run a layer (on the meta device) on `call` and see what it gives.

    UserError if it does not return a hidden state first, or adds to a list that it is handed.
    """

    def see(module: nn.Module, seen: LayerInputs, given: Tensor) -> tuple[Any, LayerInputs, Any]:
        before = _contents(seen)
        return seen.apply(module, given), seen, before

    output, seen, before = dry_run(layer, call, hidden, see)
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor) or first.shape != hidden.shape:
        raise UserError(
            f"{type(layer).__name__} does not return a hidden state first, so it cannot be split into stages"
        )
    extras, spec = tree_flatten(tuple(output[1:])) if isinstance(output, (tuple, list)) else (None, None)
    effects = tuple(_effects(name, layer, call, seen, before))
    return LayerOutputSpec(name=name, extras=extras, spec=spec, effects=effects)


def _contents(call: LayerInputs) -> dict[int | str, dict[Any, Any]]:
    return {place: dict(value) for place, value in call.arguments().items() if isinstance(value, MutableMapping)}


def _effects(
    name: str, layer: nn.Module, call: LayerInputs, seen: LayerInputs, before: Mapping[Any, Any]
) -> Iterator[Effect]:
    for place, value in seen.arguments().items():
        given = call.argument(place)
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


def _named(prefix: str, leaves: list[Any]) -> dict[str, Any]:
    return {f"{prefix}.{index}": leaf for index, leaf in enumerate(leaves)}
