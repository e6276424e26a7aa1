"""Which modules of a layer ZeRO-3 must gather as one, because what they call depends on the values of their inputs.

Experts in a loop are called as tokens chose them. ZeRO-3 follows every call, and stops or hangs when the ranks of the
data group, with their own tokens, call otherwise. What lies inside a leaf module it does not follow. A leaf must be
called exactly once in a forward, and nothing outside of it may read its parameters: its gradients are reduced as soon
as the backward has passed through it.

On the meta device tensors have no values. So a module whose own forward runs there does not look at values, and what it
calls does not depend on them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from harness.deepspeed.pipeline import LayerCall
from harness.hf.layers.dry_run import ASKS_FOR_VALUES, CPU, META, zeroed
from harness.hf.layers.inputs import LayerOutput
from harness.parallel.plans.experts import run_where_aligned
from harness.parallel.values import Argument, Keyword, Positional, Value


@torch.no_grad()
def leaves_of(layer: nn.Module, run: Callable[[nn.Module], object]) -> frozenset[str]:
    """Return the names of the modules of `layer`, on the meta device, that are to be leaves; "" is `layer` itself.

    Args:
        run: calls the module that it is given as the model would, with tensors on the meta device.
    """
    watch = _Watch(layer)
    run(watch.layer)
    leaves = {watch.lowest_leaf(name) for name in watch.looked_at_values}
    return frozenset(name for name in leaves if not any(name != other and _within(name, other) for other in leaves))


def leaves_of_sequence(sequence: nn.Module, calls: Iterable[LayerCall], inputs: Value) -> list[str]:
    """Return the names of the modules of `sequence` that are to be leaves.

    Args:
        calls: the modules and functions of `sequence`, one after the other, or functions with a module as first
            argument (`functools.partial`).
        inputs: of the first; tensors, of which only shape and dtype count.
    """
    names = {id(module): name for name, module in sequence.named_modules()}
    value, leaves = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), inputs), []
    for call in calls:
        module, function = call, None
        if isinstance(call, partial) and call.args and isinstance(call.args[0], nn.Module):
            module, function = call.args[0], call.func
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
    """A copy of a layer that records its calls, its reads of parameters, and which modules look at values.

    Attributes:
        layer: the copy.
        calls: name of a module -> how often it was called.
        reads: name of a module -> the modules that were running when one of its own parameters was read.
        looked_at_values: modules with others inside, whose own forward looks at values.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = copy.deepcopy(layer).to(META)  # buffers may be real
        self.calls: Counter[str] = Counter()
        self.reads: dict[str, list[tuple[str, ...]]] = {}
        self.looked_at_values: set[str] = set()
        self.running: list[str] = []
        original = dict(layer.named_modules())
        for name, module in self.layer.named_modules():
            module.forward = partial(self._call, name, module.forward, original[name])
            parameters = module._parameters  # noqa: SLF001  # where torch looks when a forward reads an attribute
            module.__dict__["_parameters"] = _RecordedReads(parameters, partial(self._read, name))

    def lowest_leaf(self, name: str) -> str:
        """Return the module itself or the nearest one around it that may be a leaf; the layer where there is none."""
        while name and not self._may_be_leaf(name):
            name = name.rpartition(".")[0]
        return name

    def _may_be_leaf(self, name: str) -> bool:
        read_inside = all(
            name in running for owner, all_ in self.reads.items() if _within(owner, name) for running in all_
        )
        return self.calls[name] == 1 and read_inside

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
        depth = len(self.running)
        try:
            return forward(*args, **kwargs)
        except ASKS_FOR_VALUES:
            if any(True for _ in original.children()):  # without a module inside, there is no call that could differ
                self.looked_at_values.add(name)
            return _on_zeros(original, args, kwargs)
        finally:
            del self.running[depth - 1 :]

    def _read(self, name: str) -> None:
        self.reads.setdefault(name, []).append(tuple(self.running))


class _RecordedReads(dict[str, nn.Parameter | None]):
    """The parameters of a module; each read of one is reported."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], on_read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._on_read = on_read

    def __getitem__(self, key: str) -> nn.Parameter | None:
        self._on_read()
        return super().__getitem__(key)


def _on_zeros(module: nn.Module, args: Positional, kwargs: Keyword) -> LayerOutput:
    """Run a module of the meta device on zeros; return its output on meta."""
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor, device=CPU), (args, kwargs))
    on_zeros = zeroed(module, CPU)
    run_where_aligned(on_zeros, torch.float32)
    output = on_zeros(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), output)


def _within(name: str, outer: str) -> bool:
    """Return whether the module `name` is `outer` or lies inside of it."""
    return not outer or name == outer or name.startswith(outer + ".")
