"""Norms with a gate on a GPU, found by trial: those of state-space layers and linear attention.

Mamba-2 normalises activation(gate) * x, in groups of a row; Qwen3-Next multiplies a norm by activation(gate). Each is
torch's fused norm and one kernel of a gate instead of a dozen operations.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.device.kernels import trial
from harness.extras.fusing.gates import Gated, gate_at_once, gate_plainly
from harness.extras.fusing.kernels import Activation, Gate
from harness.extras.fusing.norms import (
    ROUNDINGS,
    SCALES,
    Attributes,
    Sizes,
    agree,
    epsilons,
    twin_of,
    vectors_of,
)

ACTIVATIONS = ("silu", "sigmoid")
"""Activations of gates."""
NAMES = ("hidden_states", "gate")
"""Parameters of their forward."""


@dataclass(frozen=True)
class GatedNorm:
    """Computes norm(x) * activation(gate), or norm(activation(gate) * x), of x and gate [..., n].

    The norm is x / sqrt(mean square + epsilon) * weight [n].

    Attributes:
        gate_first: whether the norm is that of the product.
        weight: name of the parameter.
        size: number of neighbours in a row that have a mean square of their own.
    """

    gate_first: bool
    activation: str
    weight: str
    size: int
    epsilon: float

    def __call__(self, module: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the norm with its gate."""
        weight: Tensor = getattr(module, self.weight)
        if gate is None or not gate.dtype == weight.dtype == hidden_states.dtype or gate.shape != hidden_states.shape:
            plain: Tensor = type(module).forward(module, hidden_states, gate)
            return plain
        return self.of(gate_at_once, hidden_states, gate, weight)

    def of(self, gated: Gated, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of `x` with its gate, which `gated` applies."""
        how = Gate(Activation(self.activation), wide=True)
        if self.gate_first:
            return self._normal(gated(how, gate, x), weight)
        return gated(how, gate, self._normal(x, weight))

    def _normal(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.size == x.shape[-1]:
            return functional.rms_norm(x, x.shape[-1:], weight, self.epsilon)
        of_groups = functional.rms_norm(x.unflatten(-1, (-1, self.size)), (self.size,), None, self.epsilon)
        return of_groups.flatten(-2) * weight


def gated_norm_of(module: nn.Module) -> GatedNorm | None:
    """Return the norm with a gate that a module computes; None for any other module."""
    described = vectors_of(module)
    if described is None or tuple(inspect.signature(module.forward).parameters) != NAMES:
        return None
    return _tried(type(module), *described)  # type: ignore[arg-type]  # mypy takes the class for its instances


@cache
def _tried(kind: type[nn.Module], attributes: Attributes, sizes: Sizes) -> GatedNorm | None:
    if len(sizes) != 1 or (of_weight := sizes[0][1]) is None:
        return None
    name, width = sizes[0][0], of_weight[0]
    numbers = [value for _, value in attributes if isinstance(value, int) and value > 1 and width % value == 0]
    groups = dict.fromkeys([width, *numbers, *(width // number for number in numbers)])
    parts = product((False, True), ACTIVATIONS, groups, epsilons(kind, attributes))
    candidates = [GatedNorm(first, activation, name, size, epsilon) for first, activation, size, epsilon in parts]
    try:
        twins = [twin_of(kind, attributes, sizes, width, dtype) for dtype in (torch.float32, torch.bfloat16)]
        return next((norm for norm in candidates if all(_agrees(norm, twin, width) for twin in twins)), None)
    except Exception:  # whatever other modules do with these inputs
        return None


@trial()
def _agrees(norm: GatedNorm, twin: nn.Module, width: int) -> bool:
    """Return whether a norm gives a module's outputs and, in float32, its gradients."""
    dtype = next(twin.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    for scale in SCALES:
        drawn, of_gate = (torch.randn((2, 3, width), generator=generator, device="cpu") for _ in range(2))
        inputs = (scale * (drawn + 0.5)).to(dtype).requires_grad_()
        gate = (3 * of_gate).to(dtype).requires_grad_()
        found = norm.of(gate_plainly, inputs, gate, getattr(twin, norm.weight))
        trained = [inputs, gate, *twin.parameters()]
        # In 16 bits twice the difference of a norm: a norm and a product round.
        if not agree(found, twin(inputs, gate), trained, drawn, 2 * ROUNDINGS):
            return False
    return True
