"""Inspect decoder layers by running them without weights: outputs, random numbers, ZeRO-3 leaves.

Outputs: a layer may return more than its hidden state, or put values into a mapping among its arguments (keys and
values, indices). A `LayerOutputSpec` names each of these tensors, so that one stage can take it out and another can put
it back.

ZeRO-3 leaves: experts in a loop are called in an order that depends on the tokens. ZeRO-3 gathers parameters at every
call, and fails or hangs if data-parallel ranks call modules in different orders. It does not look inside a leaf module.
A leaf must be called exactly once in a forward, and nothing outside may read its parameters, because its gradients are
reduced as soon as the backward has passed through it. A module whose own forward runs on the meta device does not read
values, so its calls do not depend on them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from harness.deepspeed.pipeline import LayerCall
from harness.errors import UserError
from harness.hf.layers.call import LayerInputs, LayerOutput
from harness.hf.layers.dry_run import ASKS_FOR_VALUES, CPU, META, drawn_shapes, dry_run, zeroed
from harness.parallel.plans.experts import run_where_aligned
from harness.parallel.values import Argument, Keyword, Positional, Value

Contents: TypeAlias = dict[int | str, dict[Hashable, object]]
"""Position or name of an argument that is a mapping -> its content."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A value that a layer stores under `key` in its mapping argument `argument`."""

    argument: int | str
    key: Hashable
    name: str
    leaves: list[object]
    spec: TreeSpec


@dataclass(frozen=True, kw_only=True)
class LayerOutputSpec:
    """The structure of one layer's output.

    Attributes:
        name: the layer's name, the prefix of its tensors' names.
        extras: the flattened outputs after the hidden state, on the meta device; None for a bare hidden state.
        spec: the nesting of `extras`.
        effects: the values that the layer stores in mappings.
    """

    name: str
    extras: list[object] | None
    spec: TreeSpec | None
    effects: tuple[Effect, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> meta tensor of every output except the hidden state."""
        named = _named(f"{self.name}.output", self.extras or [])
        for effect in self.effects:
            named |= _named(effect.name, effect.leaves)
        return {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}

    def renamed(self, name: str) -> LayerOutputSpec:
        effects = tuple(replace(e, name=name + e.name.removeprefix(self.name)) for e in self.effects)
        return replace(self, name=name, effects=effects)

    def output(self, hidden: Tensor, known: Mapping[str, Tensor]) -> LayerOutput:
        """Return the layer's output: `hidden` [batch, sequence, width], the tensors in `known`, and None for others."""
        if self.extras is None or self.spec is None:
            return hidden
        leaves = [known.get(name) for name in _named(f"{self.name}.output", self.extras)]
        return hidden, *tree_unflatten(leaves, self.spec)

    def affect(self, inputs: LayerInputs, known: Mapping[str, Tensor]) -> None:
        """Change the mappings of `inputs` as the layer would, with the values in `known`."""
        for effect in self.effects:
            leaves = [known.get(name) for name in _named(effect.name, effect.leaves)]
            if all(leaf is not None for leaf in leaves):
                inputs.argument(effect.argument)[effect.key] = tree_unflatten(leaves, effect.spec)

    def take(self, inputs: LayerInputs, output: LayerOutput) -> dict[str, Tensor]:
        """Return name -> tensor, except the hidden state, of a layer that mapped `inputs` to `output`."""
        found: dict[str, object] = {}
        if self.extras is not None:
            found |= _named(f"{self.name}.output", tree_flatten(tuple(output[1:]))[0])
        for effect in self.effects:
            found |= _named(effect.name, tree_flatten(inputs.argument(effect.argument)[effect.key])[0])
        return {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}


def kind_of(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers with equal modules, shapes and settings: their outputs nest alike."""

    # Without numbers, as one may be the layer's index.
    def settings(module: nn.Module) -> tuple[tuple[str, bool | str], ...]:
        return tuple(sorted((key, value) for key, value in vars(module).items() if isinstance(value, (bool, str))))

    modules = tuple((name, type(module), settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


@torch.no_grad()
def output_spec_of(name: str, layer: nn.Module, inputs: LayerInputs, hidden: Tensor) -> LayerOutputSpec:
    """Run a layer on meta with `hidden` [batch, sequence, width]; return the structure of its other outputs.

    Raises UserError if the layer does not return a hidden state first, or appends to a list argument.
    """

    def run(module: nn.Module, passed: LayerInputs, state: Tensor) -> tuple[LayerOutput, LayerInputs, Contents]:
        # Copied first: a layer changes its mapping arguments.
        before = {at: dict(value) for at, value in passed.arguments().items() if isinstance(value, MutableMapping)}
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


def _effects(
    name: str, layer: nn.Module, inputs: LayerInputs, passed: LayerInputs, before: Contents
) -> Iterator[Effect]:
    for argument, value in passed.arguments().items():
        given = inputs.argument(argument)
        # A list has no key by which another stage could restore the value.
        if isinstance(value, list) and len(value) != len(given):
            raise UserError(
                f"{type(layer).__name__} appends to a list shared with other layers, so it cannot be split into stages"
            )
        if not isinstance(value, MutableMapping):
            continue
        for key in value:
            # By identity, because values on meta cannot be compared.
            if key not in before[argument] or value[key] is not before[argument][key]:
                leaves, spec = tree_flatten(value[key])
                yield Effect(argument=argument, key=key, name=f"{name}.{argument}.{key}", leaves=leaves, spec=spec)


def _named(prefix: str, leaves: list[object]) -> dict[str, object]:
    return {f"{prefix}.{index}": leaf for index, leaf in enumerate(leaves)}


@torch.no_grad()
def leaves_of(layer: nn.Module, run: Callable[[nn.Module], object]) -> frozenset[str]:
    """Return the names of modules of `layer`, on the meta device, that must be ZeRO-3 leaves; "" is `layer` itself.

    Args:
        run: calls its argument, a copy of `layer`, like the model does, with tensors on the meta device.
    """
    watch = _Watch(layer)
    run(watch.layer)
    leaves = {watch.lowest_leaf(name) for name in watch.looked_at_values}
    # Drop leaves inside another leaf, where ZeRO-3 does not look.
    return frozenset(name for name in leaves if not any(name != other and _within(name, other) for other in leaves))


def leaves_of_sequence(sequence: nn.Module, calls: Iterable[LayerCall], inputs: Value) -> list[str]:
    """Return the names of the modules of `sequence` that must be ZeRO-3 leaves.

    Args:
        calls: the modules and functions of `sequence` in order, or functions with a module as first argument
            (`functools.partial`).
        inputs: inputs of the first call; only shapes and dtypes count.
    """
    names = {id(module): name for name, module in sequence.named_modules()}
    value = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), inputs)
    leaves: list[str] = []
    for call in calls:
        module = call
        function: LayerCall | None = None
        if isinstance(call, partial) and call.args and isinstance(call.args[0], nn.Module):
            module = call.args[0]
            function = call.func
        if isinstance(module, nn.Module):
            outputs: list[Value] = []
            found = leaves_of(module, partial(_keep_output, outputs, function, value))
            leaves += [f"{names[id(module)]}.{name}".rstrip(".") for name in found]
            value = outputs[0]
        else:
            value = call(value)
    return leaves


def _keep_output(outputs: list[Value], function: LayerCall | None, value: Value, module: nn.Module) -> None:
    outputs.append(module(value) if function is None else function(module, value))


class _Watch:
    """A copy of a layer that records calls, reads of parameters, and modules that read values.

    Attributes:
        layer: the copy.
        calls: name of a module -> number of calls.
        reads: name of a module -> the running modules at each read of its own parameters.
        looked_at_values: modules with children whose own forward reads values.
    """

    def __init__(self, layer: nn.Module) -> None:
        # Buffers may be real.
        self.layer = copy.deepcopy(layer).to(META)
        self.calls: Counter[str] = Counter()
        self.reads: dict[str, list[tuple[str, ...]]] = {}
        self.looked_at_values: set[str] = set()
        self.running: list[str] = []
        original = dict(layer.named_modules())
        for name, module in self.layer.named_modules():
            # On the instance, so that hooks and calls by the layer's own code go through it.
            module.forward = partial(self._call, name, module.forward, original[name])
            parameters = module._parameters  # noqa: SLF001  # where torch looks when a forward reads an attribute
            module.__dict__["_parameters"] = _RecordedReads(parameters, partial(self._read, name))

    def lowest_leaf(self, name: str) -> str:
        """Return the innermost module, from `name` outwards, that may be a leaf, or "" for the layer itself."""
        while name:
            reads = [running for owner, found in self.reads.items() if _within(owner, name) for running in found]
            # Called once, and all of its parameters read while it runs.
            if self.calls[name] == 1 and all(name in running for running in reads):
                break
            name = name.rpartition(".")[0]
        return name

    def _call(
        self,
        name: str,
        forward: Callable[..., LayerOutput],
        original: nn.Module,
        /,
        *args: Argument,
        **kwargs: Argument,
    ) -> LayerOutput:
        self.calls[name] += 1
        self.running.append(name)
        try:
            return forward(*args, **kwargs)
        except ASKS_FOR_VALUES:
            # A module without children makes no calls whose order could differ between ranks.
            if any(True for _ in original.children()):
                self.looked_at_values.add(name)
            return _on_zeros(original, args, kwargs)
        finally:
            self.running.pop()

    def _read(self, name: str) -> None:
        self.reads.setdefault(name, []).append(tuple(self.running))


class _RecordedReads(dict[str, nn.Parameter | None]):
    """A module's parameters, reporting each read."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], on_read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._on_read = on_read

    def __getitem__(self, key: str) -> nn.Parameter | None:
        self._on_read()
        return super().__getitem__(key)


def _on_zeros(module: nn.Module, args: Positional, kwargs: Keyword) -> LayerOutput:
    """Run a meta module on zeros; return its output on meta."""
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor, device=CPU), (args, kwargs))
    on_zeros = zeroed(module, CPU)
    run_where_aligned(on_zeros, torch.float32)
    output = on_zeros(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), output)


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(outer + ".")


class LayerFacts:
    """Outputs, random numbers and ZeRO-3 leaves of a model's decoder layers, found once per kind of layer.

    Args:
        layers: the decoder layers, whole and on the meta device.
        names: their names in the model.

    Attributes:
        output_specs: index of an observed layer -> its outputs besides the hidden state.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._layers = layers
        self._names = names
        self.output_specs: dict[int, LayerOutputSpec] = {}
        self._output_specs_by_kind: dict[Hashable, LayerOutputSpec] = {}
        self._examples: dict[Hashable, tuple[LayerInputs, Tensor]] = {}
        self._leaves: dict[Hashable, frozenset[str]] = {}
        self._drawn_shapes: dict[tuple[int, torch.Size], list[torch.Size]] = {}

    def observe(self, index: int, inputs: LayerInputs, hidden: Tensor) -> LayerOutputSpec:
        """Return the outputs of layer `index` besides `hidden` [batch, sequence, width], found at its first call."""
        if index not in self.output_specs:
            layer = self._layers[index]
            name = self._names[index]
            # Run once per kind, as a layer that reads values takes a second.
            kind = kind_of(layer)
            if kind not in self._output_specs_by_kind:
                self._output_specs_by_kind[kind] = output_spec_of(name, layer, inputs, hidden)
                self._examples[kind] = inputs, hidden
            self.output_specs[index] = self._output_specs_by_kind[kind].renamed(name)
        return self.output_specs[index]

    def drawn_shapes(self, index: int, inputs: LayerInputs, hidden: Tensor) -> list[torch.Size]:
        """Return the shapes of the uncut layer `index`'s random numbers for `hidden` [batch, sequence, width]."""
        key = index, hidden.shape
        if key not in self._drawn_shapes:
            self._drawn_shapes[key] = drawn_shapes(self._layers[index], inputs, hidden)
        return self._drawn_shapes[key]

    def zero3_leaves(self, index: int) -> frozenset[str]:
        """Return the names of modules in layer `index` that ZeRO-3 must gather as a unit."""
        layer = self._layers[index]
        kind = kind_of(layer)
        if kind not in self._leaves:
            # Of the same kind, so equal in all but values, which meta does not have.
            inputs, hidden = self._examples[kind]
            inputs = inputs.mapped(lambda tensor: tensor.to(META))
            hidden = hidden.to(META)
            self._leaves[kind] = leaves_of(layer, lambda watched: inputs.apply(watched, hidden))
        return self._leaves[kind]
