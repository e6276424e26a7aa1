"""Torch's operations in the place of the kernels of a GPU, as they are equal: see tests/unit/extras/test_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from harness.extras.fusing import kernels
from harness.extras.fusing.activations import plain_activation
from harness.extras.fusing.gates import gate_plainly
from harness.extras.fusing.kernels import Activation, Gate, Turn
from harness.extras.fusing.rotations import turned


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device have the kernels."""
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    of_gates = (gate, gate_backward, gate_halves, gate_halves_backward, activate, activate_backward)
    for function in (rotate, *of_gates, rms_norm, rms_norm_backward):
        monkeypatch.setattr(kernels, function.__name__, function)


def rotate(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, turn: Turn, *, backward: bool = False
) -> tuple[Tensor, ...]:
    def forward(*heads: Tensor) -> tuple[Tensor, ...]:
        return tuple(turned(each, cos, sin, turn) for each in heads)

    return _gradients(forward, tensors, tensors) if backward else tuple(each.clone() for each in forward(*tensors))


def gate(gates: Tensor, ups: Tensor, how: Gate) -> Tensor:
    return gate_plainly(how, gates, ups)


def gate_backward(grads: Tensor, gates: Tensor, ups: Tensor, how: Gate) -> tuple[Tensor, ...]:
    return _gradients(lambda x, y: (gate_plainly(how, x, y),), (gates, ups), (grads,))


def gate_halves(both: Tensor, how: Gate) -> Tensor:
    return gate_plainly(how, *how.parts(both))


def gate_halves_backward(grads: Tensor, both: Tensor, how: Gate) -> Tensor:
    return _gradients(lambda x: (gate_plainly(how, *how.parts(x)),), (both,), (grads,))[0]


def activate(x: Tensor, activation: Activation) -> Tensor:
    return plain_activation(activation, x)


def activate_backward(grads: Tensor, x: Tensor, activation: Activation) -> Tensor:
    return _gradients(lambda x: (plain_activation(activation, x),), (x,), (grads,))[0]


def rms_norm(x: Tensor, weight: Tensor, offset: float, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scales = (wide.square().mean(-1) + epsilon).rsqrt()
    return (wide * scales[..., None] * (weight.float() + offset)).to(x.dtype), scales


def rms_norm_backward(grads: Tensor, x: Tensor, weight: Tensor, scales: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    normal, grad = x.float() * scales[..., None], grads.float()
    weighted = grad * (weight.float() + offset)
    of_x = (weighted - normal * (weighted * normal).mean(-1, keepdim=True)) * scales[..., None]
    return of_x.to(x.dtype), (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)


def _gradients(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        given = [each.detach().clone().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*given), given, list(grads))
