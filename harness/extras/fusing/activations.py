"""Activations of a GPU in one kernel, found by trial.

GPT-2's GELU is written as eight operations, the square of a ReLU as two, QuickGELU as three. A module without
parameters computes a few numbers, and outputs and gradients are compared with the activations that torch, or a kernel
of the harness, computes at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from harness.device.kernels import trial
from harness.extras.fusing import kernels
from harness.extras.fusing.kernels import Activation
from harness.extras.fusing.norms import takes
from harness.parallel.comm import Context
from harness.parallel.generators import own_torch_generators

CLOSE = 1e-5
"""Largest difference in float32, relative to the largest input."""
ROUNDINGS = 2**-7
"""The same in bf16, relative to each input or output: a family rounds after each operation, a kernel once."""
RANGES = (4.0, 40.0)
"""Largest inputs of a trial: the first tells GELU from its approximation, the second shows clipping."""


AT_ONCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}
"""Activations that torch computes in one kernel."""
KNOWN = (*map(Activation, AT_ONCE), Activation("relu2"), Activation("swish", 1.702))
"""Activations that are tried."""


@dataclass(frozen=True)
class _Kind:
    """Modules that compute the same: a class and its settings; `module` is any of them."""

    kind: type[nn.Module]
    settings: tuple[tuple[str, str], ...]
    module: nn.Module = field(compare=False)


def plain_activation(activation: Activation, x: Tensor) -> Tensor:
    """Return an activation of `x` by torch's own operations."""
    if activation.name == "swish":
        return x * torch.sigmoid(activation.beta * x)
    if activation.name == "relu2":
        return functional.relu(x).square()
    return AT_ONCE[activation.name](x)


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes; None for any other module."""
    found = _tried(kind) if (kind := _kind_of(module)) else None
    return None if found is None else found[0]


def fused_activation(module: nn.Module) -> Callable[..., Tensor] | None:
    """Return a forward in one kernel for a module that computes an activation in several; None for any other."""
    found = _tried(kind) if (kind := _kind_of(module)) else None
    return partial(_activated, found[0]) if found is not None and found[1] > 1 else None


def reads_mode(method: Callable[..., object]) -> bool:
    """Return whether a method asks if its module is in training: a trial in one mode says nothing of the other."""
    return "training" in inspect.unwrap(method).__code__.co_names


def _kind_of(module: nn.Module) -> _Kind | None:
    home = type(module).__module__
    if home.startswith("torch.") and home != nn.SiLU.__module__:
        return None
    if any(True for _ in (*module.children(), *module.parameters(), *module.buffers())) or not takes(module, 1):
        return None
    if reads_mode(type(module).forward):
        return None
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    texts = tuple((name, str(getattr(value, "__func__", value))) for name, value in settings.items())
    return _Kind(type(module), texts, module)


def _activated(activation: Activation, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    (x,) = args or kwargs.values()
    if activation.name in AT_ONCE:
        return AT_ONCE[activation.name](x)
    if type(x) is not Tensor or not x.is_contiguous() or not x.numel():
        plain: Tensor = type(module).forward(module, x)
        return plain
    activated: Tensor = _Activated.apply(x, activation)  # type: ignore[no-untyped-call]
    return activated


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return kernels.activate(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return kernels.activate_backward(grad.contiguous(), x, ctx.activation), None


class _Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        self.count += 1
        return called(*args, **(kwargs or {}))


@cache
@trial()
def _tried(kind: _Kind) -> tuple[Activation, int] | None:
    """Return the activation that a module computes, and in how many operations."""
    module = kind.module
    with own_torch_generators(0):  # a module that draws random numbers must not draw any of the run's
        return _compared(module)


def _compared(module: nn.Module) -> tuple[Activation, int] | None:
    try:
        found = next((each for each in KNOWN if all(_agrees(module, each, most) for most in RANGES)), None)
        if found is None:
            return None
        x = torch.ones(3, device="cpu")
        with torch.no_grad(), _Operations() as operations:  # type: ignore[no-untyped-call]  # torch's own
            module(x)
    except Exception:  # whatever other modules do with these inputs
        return None
    return found, operations.count


def _agrees(module: nn.Module, activation: Activation, most: float) -> bool:
    """Return whether a module has the outputs of an activation and, in float32, its gradients."""
    x = torch.linspace(-most, most, 101, device="cpu").requires_grad_()
    ours, theirs = plain_activation(activation, x), module(x)
    if theirs.dtype != x.dtype or theirs.shape != x.shape or not _close(ours, theirs, CLOSE * most):
        return False
    of_ours, of_theirs = (torch.autograd.grad(each.sum(), x)[0] for each in (ours, theirs))
    if not _close(of_ours, of_theirs, CLOSE * most):
        return False
    narrow = x.detach().bfloat16()
    ours, theirs = plain_activation(activation, narrow), module(narrow)
    # of the input, because 1 + tanh(x) rounds as 1 does, however small the sum is
    limit = ROUNDINGS * torch.maximum(narrow.float().abs(), theirs.float().abs())
    return theirs.dtype == narrow.dtype and _close(ours, theirs, limit)


def _close(ours: Tensor, theirs: Tensor, limit: Tensor | float) -> bool:
    return bool(((ours.float() - theirs.float()).abs() <= limit).all())
