"""Gates that a module computes, found in two ways.

A method of one tensor is tried, as that by which transformers' experts gate, or the forward of a feed-forward block. It
computes small random inputs, and outputs and gradients are compared with the gates that the kernel knows, such as
clamped ones. In the forward of any other module a product of an activation and something else is rewritten
(`gate_code.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import permutations, product
from math import isfinite
from types import FunctionType, MethodType, SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from harness.device.kernels import trial
from harness.extras.fusing.activations import activation_of, reads_mode
from harness.extras.fusing.gate_code import FUNCTIONS, rewritten
from harness.extras.fusing.gates import FeedForward, GateOfOne, gate_plainly
from harness.extras.fusing.kernels import Activation, Gate
from harness.extras.fusing.norms import CLOSE, PLAIN, ROUNDINGS, Attributes

METHODS = ("forward", "_apply_gate")
"""Methods that may gate; the second is that of experts (transformers.integrations.moe)."""
USUAL = list(dict.fromkeys(FUNCTIONS.values()))
"""Activations of methods that are tried, beside those that a module has."""
TRIAL = 16
"""Width of the gates of a trial."""
LARGEST = 1e4
"""Of the numbers that may be a limit, or the beta of swish."""

Method: TypeAlias = Callable[..., Tensor]


def gated(module: nn.Module) -> dict[str, Method]:
    """Return the methods of a module that gate by an activation, in a form that does so in one kernel."""
    activations = dict(_activations(module))
    found = {name: _in_one_kernel(module, getattr(type(module), name, None), activations) for name in METHODS}
    return {name: method for name, method in found.items() if method is not None}


def _in_one_kernel(module: nn.Module, method: object, activations: Mapping[str, Activation]) -> Method | None:
    if not isinstance(method, FunctionType) or hasattr(method, "__wrapped__") or method.__closure__:
        return None
    changed = rewritten(method, tuple(activations.items()))
    if changed is not None and method.__name__ == "forward" and "clamp" not in method.__code__.co_names:
        return changed
    return _by_trial(module, method, activations) or changed


def _activations(module: nn.Module) -> Iterator[tuple[str, Activation]]:
    """Yield (attribute, activation) of a module."""
    for attribute, child in module.named_children():
        if (activation := activation_of(child)) is not None:
            yield attribute, activation
    for attribute, value in vars(module).items():
        if isinstance(value, Hashable) and value in FUNCTIONS:
            yield attribute, FUNCTIONS[value]


@dataclass(frozen=True)
class _Subject:
    """A method to try, and the attributes of its module; `modules` are the activations among them."""

    method: FunctionType
    attributes: Attributes
    activations: tuple[tuple[str, Activation], ...]
    layers: tuple[str, ...]
    modules: Mapping[str, object] = field(compare=False)


def _by_trial(module: nn.Module, method: FunctionType, activations: Mapping[str, Activation]) -> Method | None:
    """Return what computes the same as a method of one tensor in one kernel; None if it is not a gate."""
    if len(inspect.signature(method).parameters) != 2 or reads_mode(method):
        return None
    read = method.__code__.co_names
    attributes = tuple(
        (name, value) for name, value in vars(module).items() if name in read and isinstance(value, PLAIN)
    )
    modules = {name: getattr(module, name) for name in activations}
    others = [name for name, _ in module.named_children() if name not in activations]
    is_block = method.__name__ == "forward"
    if is_block and (len(others) not in (2, 3) or any(True for _ in module.parameters(recurse=False))):
        return None
    layers = tuple(others) if is_block else ()
    return _tried(_Subject(method, attributes, tuple(activations.items()), layers, modules))


@cache
@trial()
def _tried(subject: _Subject) -> Method | None:
    numbers = [float(value) for _, value in subject.attributes if isinstance(value, int | float)]
    numbers = [value for value in numbers if isfinite(value) and 0 < value < LARGEST]
    swish = [Activation("swish", beta) for beta in numbers]
    kinds = dict.fromkeys([activation for _, activation in subject.activations] + USUAL + swish)
    clamps = [(None, False), *product(numbers, (False, True))]
    gates = [Gate(kind, limit, after, offset) for kind, (limit, after), offset in product(kinds, clamps, (0.0, 1.0))]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((8, 2 * TRIAL), generator=generator, device="cpu")
    x[4:] *= 2 * max(numbers, default=4.0)  # beyond every limit
    for layers in permutations(subject.layers):
        try:
            how = _gate_of(_method_of(subject, layers), x, gates)
        except Exception:  # whatever other methods do with these inputs
            continue
        if how is not None:
            return FeedForward(how, layers) if layers else GateOfOne(how)
    return None


def _method_of(subject: _Subject, layers: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return a method as a function of one tensor [..., 2n], with parts of it for what linear layers compute."""
    given: dict[str, object] = {**dict(subject.attributes), **subject.modules}
    if not layers:
        return MethodType(subject.method, SimpleNamespace(**given))
    *first, last = layers
    parts = [torch.clone] if len(first) == 1 else [lambda x: x[..., :TRIAL], lambda x: x[..., TRIAL:]]
    given |= {**dict(zip(first, parts, strict=True)), last: torch.neg}
    block = MethodType(subject.method, SimpleNamespace(**given))
    return lambda x: -block(x)  # the sign shows which layer is the last


def _gate_of(method: Callable[[Tensor], Tensor], x: Tensor, gates: Iterable[Gate]) -> Gate | None:
    """Return the gate that a method computes of tensors [..., 2n]; None if it computes something else."""
    wanted = _results(method, x)
    for gate, neighbours, gate_last in product(gates, (False, True), (False, True)):
        how = replace(gate, neighbours=neighbours, gate_last=gate_last)
        if _same(_of_both(how, x), wanted[0]) and all(map(_same, _results(partial(_of_both, how), x), wanted)):
            return _rounding_as(method, how, x.bfloat16())
    return None


def _of_both(how: Gate, x: Tensor) -> Tensor:
    return gate_plainly(how, *how.parts(x))


def _results(method: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a method gives for `x`, and a gradient of `x`."""
    x = x.clone().requires_grad_()
    output = method(x)
    (of_x,) = torch.autograd.grad((output * x.detach().flip(-1)[..., :TRIAL]).sum(), x)
    return output.detach(), of_x


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two results in float32 are equal, up to sums in another order."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return bool(((found - wanted).abs() <= CLOSE * wanted.abs().amax(-1, keepdim=True)).all())


def _rounding_as(method: Callable[[Tensor], Tensor], how: Gate, x: Tensor) -> Gate | None:
    """Return the gate with the roundings of a method in bf16; None if it differs by more."""
    wanted = method(x)
    ways = [replace(how, wide=wide) for wide in (False, True)]
    results = [(way, _of_both(way, x)) for way in ways]
    if any(found.dtype != wanted.dtype for _, found in results):
        return None
    same = [way for way, found in results if torch.equal(found, wanted)]
    near = [way for way, found in results if torch.allclose(found, wanted, rtol=ROUNDINGS, atol=ROUNDINGS / 8)]
    return next(iter(same + near), None)
