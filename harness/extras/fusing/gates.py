"""Gated activations of a GPU in one kernel: `found_gates.py` says which code they replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.extras.fusing import kernels
from harness.extras.fusing.activations import plain_activation
from harness.extras.fusing.kernels import Gate
from harness.parallel.comm import Context

Gated: TypeAlias = Callable[[Gate, Tensor, Tensor], Tensor]
"""Applies a gate to gates and inputs."""


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gates: Tensor, ups: Tensor, how: Gate) -> Tensor:
        ctx.save_for_backward(gates, ups)
        ctx.how = how
        return kernels.gate(gates, ups, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, ups = ctx.saved_tensors
        return *kernels.gate_backward(grad.contiguous(), gates, ups, ctx.how), None


class _GateOfHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, both: Tensor, how: Gate) -> Tensor:
        ctx.save_for_backward(both)
        ctx.how = how
        return kernels.gate_halves(both, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        return kernels.gate_halves_backward(grad.contiguous(), both, ctx.how), None


def gate_plainly(how: Gate, gates: Tensor, ups: Tensor) -> Tensor:
    """Return activation(gates) * ups by torch's own operations, which round where the kernel does."""
    dtype = gates.dtype
    if how.wide:
        gates, ups = gates.float(), ups.float()
    if how.limit is not None:
        gates = gates if how.clamps_after else gates.clamp(max=how.limit)
        ups = ups.clamp(-how.limit, how.limit)
    active = plain_activation(how.activation, gates)
    if how.limit is not None and how.clamps_after:
        active = active.clamp(max=how.limit)
    return (active * (ups + how.offset if how.offset else ups)).to(dtype)


def gate_at_once(how: Gate, gates: Tensor, ups: Tensor) -> Tensor:
    """Return activation(gates) * ups, by one kernel if it applies."""
    both = type(gates) is Tensor and type(ups) is Tensor
    fits = both and gates.dtype == ups.dtype and gates.shape == ups.shape and gates.numel()
    if not fits or kernels.row_stride(gates) is None or kernels.row_stride(ups) is None:
        return gate_plainly(how, gates, ups)
    gated: Tensor = _Gate.apply(gates, ups, how)  # type: ignore[no-untyped-call]
    return gated


@dataclass(frozen=True)
class GateOfOne:
    """Gates a tensor [..., 2n] that has the gates and the inputs."""

    how: Gate

    def __call__(self, _module: nn.Module, both: Tensor) -> Tensor:
        """Return the gated inputs [..., n]."""
        if type(both) is not Tensor or not both.numel() or kernels.row_stride(both) is None:
            return gate_plainly(self.how, *self.how.parts(both))
        gated: Tensor = _GateOfHalves.apply(both, self.how)  # type: ignore[no-untyped-call]
        return gated


@dataclass(frozen=True)
class FeedForward:
    """Computes the last of some linear layers of the gate of what the others give, in one tensor or in two."""

    how: Gate
    layers: tuple[str, ...]

    def __call__(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the block's output for its one input."""
        (x,) = args or kwargs.values()
        *first, last = (getattr(module, name) for name in self.layers)
        made = [layer(x) for layer in first]
        if len(made) == 1:
            gated = GateOfOne(self.how)(module, *made)
        else:
            gated = gate_at_once(self.how, *(reversed(made) if self.how.gate_last else made))
        output: Tensor = last(gated)
        return output
