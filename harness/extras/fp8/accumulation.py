"""Accumulate gradients in parameters outside of the graph that computed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.parallel.comm import Context, apply


def accumulate_gradients(weights: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Accumulate gradients that are computed already in the parameters that `weights` are, or are views of.

    Empties the list: autograd copies a gradient to which others refer.
    """
    with torch.enable_grad():
        root = apply(_Given, gradients, *weights)
    torch.autograd.backward([root], [torch.empty_like(root)])  # whose value nobody reads


class _Given(torch.autograd.Function):
    """Return a scalar whose gradients with respect to weights are the given ones."""

    @staticmethod
    def forward(ctx: Context, gradients: list[Tensor | None], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, _one: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients
