"""Torch's operations in the place of the kernels of a GPU, as they are equal: see tests/unit/extras/test_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from harness.extras.fusing import kernels
from harness.extras.fusing.activations import plain_activation
from harness.extras.fusing.gates import gate_plainly
from harness.extras.fusing.kernels import Activation, Gate, RowNorm, Turn
from harness.extras.fusing.rotations import turned


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device have the kernels."""
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    of_gates = (gate, gate_backward, gate_halves, gate_halves_backward, activate, activate_backward)
    for function in (rotate, *of_gates, norm, norm_backward):
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


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: RowNorm, *, plus: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    total = x if plus is None else x + plus
    wide = _less_mean(total.float(), how)
    scales = (wide.square().mean(-1) + how.epsilon).rsqrt()
    normal = wide * scales[..., None] * (weight.float() + how.offset)
    return (normal if bias is None else normal + bias.float()).to(x.dtype), scales, total


def norm_backward(
    grads: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    how: RowNorm,
    *,
    has_bias: bool = False,
    of_total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    normal, grad = _less_mean(x.float(), how) * scales[..., None], grads.float()
    weighted = grad * (weight.float() + how.offset)
    of_x = _less_mean(weighted - normal * (weighted * normal).mean(-1, keepdim=True), how) * scales[..., None]
    of_x = of_x if of_total is None else of_x + of_total.float()
    of_weight, of_bias = (each.flatten(0, -2).sum(0).to(weight.dtype) for each in (grad * normal, grad))
    return of_x.to(x.dtype), of_weight, of_bias if has_bias else None


def _less_mean(x: Tensor, how: RowNorm) -> Tensor:
    return x - x.mean(-1, keepdim=True) if how.centred else x


def _gradients(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        given = [each.detach().clone().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*given), given, list(grads))
