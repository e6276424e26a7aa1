"""Weight gradients of linear layers, computed later than the gradients of their inputs.

The backward pass of y = x A^T + b needs two products: the gradient of x, which the layers before wait for, and that of
A, which nobody waits for. While a `WeightGradients` defers, a linear layer's backward pass computes the first one and
keeps x and the gradient of y for the second. Biases, norms, embeddings and other layers get their gradients at
once, and so do weights that are computed from parameters.

`accumulate` computes them while something else goes on: column-parallel layers have theirs made while the gradient of
their input is summed over the tensor-parallel group.

A deferred gradient reaches its parameter as any other does: through the parameter's hooks, so that it is summed
over tensor-parallel ranks and accumulated as if it had come at once. Until then autograd calls these hooks with None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from harness.parallel.comm import Context, apply
from harness.parallel.compiling import eager

Product = tuple[Tensor, Tensor, Tensor]
"""A weight, the input of its layer, and the gradient of the output."""


class WeightGradients:
    """The weight gradients of one stage that are yet to be computed, by micro-batch, the oldest first."""

    def __init__(self) -> None:
        self._kept: deque[list[Product]] = deque()
        self._defers = False

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Keep, while this is entered, the weight gradients of one micro-batch for `compute`."""
        self._kept.append([])
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    @property
    def keeping(self) -> list[Product] | None:
        """Where the factors of weight gradients are kept now; None while none is deferred."""
        return self._kept[-1] if self._defers else None

    def compute(self) -> None:
        """Compute and accumulate the weight gradients of the oldest micro-batch that is kept."""
        accumulate(self._kept.popleft())

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept.clear()


def accumulate(products: list[Product]) -> None:
    """Compute the weight gradients of `products`, add them to their parameters', and empty the list."""
    with torch.enable_grad():
        # the newest first: autograd runs the node that was made last first, so the gradients are added up oldest first
        roots = [apply(_Later, *products.pop()) for _ in range(len(products))]
    if roots:
        torch.autograd.backward(roots)


def attach(module: nn.Module, gradients: WeightGradients) -> None:
    """Have the linear layers in `module` ask `gradients` whether to defer those of their weights."""
    layer: Any
    for layer in module.modules():
        replacement = FORWARDS.get(type(layer).forward)
        if isinstance(layer, nn.Linear) or replacement is not None:
            layer.weight_gradients = gradients
        if replacement is not None:
            layer.forward = MethodType(replacement, layer)


def linear(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None, products: list[Product] | None = None
) -> Tensor:
    """Return `F.linear(x, weight, bias)` for a layer whose weight gradient may be deferred.

    Args:
        x: (..., in).
        weight: (out, in), a parameter of the layer or a view of one.
        products: where to leave what the weight gradient is computed from, if no schedule defers it.

    Returns:
        (..., out).
    """
    gradients: WeightGradients | None = getattr(layer, "weight_gradients", None)
    if gradients is None and products is None:
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias, gradients, products)


@eager
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients | None, products: list[Product] | None
) -> Tensor:
    if not _can_wait(x, weight):
        return F.linear(x, weight, bias)
    return apply(_Linear, x, weight, bias, gradients, products)


def _can_wait(x: Tensor, weight: Tensor) -> bool:
    """Whether a weight's gradient can be deferred: that of a parameter, or of a view of one.

    A weight that is computed from parameters has a graph of its own, which can be gone through but once.
    """
    base = weight._base if weight._is_view() else weight  # noqa: SLF001  # no public names
    trained = torch.is_grad_enabled() and weight.requires_grad and base is not None and base.is_leaf
    return trained and not torch.is_autocast_enabled(x.device.type)


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(self, x, self.weight, self.bias)


def _forward_transposed(self: Conv1D, x: Tensor) -> Tensor:
    return linear(self, x, self.weight.t(), self.bias)


FORWARDS: Mapping[object, Callable[..., Tensor]] = {
    nn.Linear.forward: _forward,
    Conv1D.forward: _forward_transposed,
}
"""Of the forward of a layer that is not the harness's own: what takes its place."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradients: WeightGradients | None,
        products: list[Product] | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not by save_for_backward: recomputation would give back a copy without its graph
        ctx.gradients, ctx.products = gradients, products
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = (rows @ ctx.weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        later = None if ctx.gradients is None else ctx.gradients.keeping
        later = ctx.products if later is None else later
        if later is None:
            grad_weight = _weight_gradient(x, grad, transposed=ctx.weight.stride(0) == 1)
        else:
            later.append((ctx.weight, x.detach(), grad))
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _Later(torch.autograd.Function):
    """A scalar whose gradient with respect to a weight is the deferred one."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, x: Tensor, grad: Tensor) -> Tensor:
        ctx.product, ctx.transposed = (x, grad), weight.stride(0) == 1
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, _one: Tensor) -> tuple[Tensor, None, None]:
        x, grad = ctx.product
        del ctx.product
        return _weight_gradient(x, grad, transposed=ctx.transposed), None, None


def _weight_gradient(x: Tensor, grad: Tensor, *, transposed: bool) -> Tensor:
    """Return the product as autograd computes it, whose rounding depends on how the weight lies in memory."""
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (x.t() @ grad).t() if transposed else grad.t() @ x
