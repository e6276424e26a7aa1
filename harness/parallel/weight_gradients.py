"""Compute weight gradients of linear layers later than the gradients of their inputs.

The backward pass of y = x A^T + b computes two products: the gradient of x, which earlier layers need, and the gradient
of A, which only the update needs. While a `DeferredGradients` defers, a linear layer's backward computes only the
first, and keeps x and the gradient of y for the second. Biases, norms, embeddings and other layers get their gradients
at once, and so do weights that are computed from parameters.

`accumulate` computes the deferred products at the end of a pipeline stage's step, or to overlap with communication:
column-parallel layers compute theirs during the all-reduce of their input's gradient.

A deferred gradient passes through the parameter's hooks like any other, so it is summed over tensor-parallel ranks and
accumulated as if it had come at once. Until then autograd calls these hooks with None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from harness.parallel.comm import Context, apply
from harness.parallel.compiling import Eager

LayerProduct: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor]
"""Returns the output [..., out] of a linear layer, its input [..., in], weight and bias."""


class Product(NamedTuple):
    """A product that is computed later, and the weights [out, in], parameters or views of them, of its gradients."""

    compute: Callable[[], Sequence[Tensor]]
    weights: Sequence[Tensor]


class DeferredGradients:
    """The deferred weight gradients of one stage, by micro-batch, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[list[Product]] = deque()
        self._defers = False

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Defer the weight gradients of one micro-batch within this context."""
        self._kept.append([])
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    @property
    def keeping(self) -> list[Product] | None:
        """The list that collects operands of weight gradients; None while nothing is deferred."""
        return self._kept[-1] if self._defers else None

    def compute(self) -> None:
        """Compute and accumulate the weight gradients of the oldest micro-batch."""
        accumulate(self._kept.popleft())

    def clear(self) -> None:
        """Drop all deferred weight gradients."""
        self._kept.clear()


def accumulate(products: list[Product]) -> None:
    """Compute the weight gradients of `products` and accumulate them in their parameters; empty the list."""
    # A backward runs without recording, and some callers are within one.
    with torch.enable_grad():
        # Newest first: autograd runs the most recent node first, so gradients are accumulated oldest first, in the
        # order of an ordinary backward. Another order would round differently.
        newest_first = (products.pop() for _ in range(len(products)))
        roots = [apply(_Later, compute, *weights) for compute, weights in newest_first]
    if roots:
        # The gradients of the roots are never read, so they need no values.
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def attach(module: nn.Module, gradients: DeferredGradients) -> None:
    """Make the linear layers in `module` defer their weight gradients whenever `gradients` defers."""
    layer: Any
    for layer in module.modules():
        # By the forward rather than by the class: a subclass with another forward computes something else.
        replacement = FORWARDS.get(type(layer).forward)
        if isinstance(layer, nn.Linear) or replacement is not None:
            layer.weight_gradients = gradients
        if replacement is not None:
            layer.forward = MethodType(replacement, layer)


def replace_product(layer: nn.Module, product: LayerProduct) -> None:
    """Have a linear layer of the harness, of torch or of transformers compute its output by `product`."""
    own = vars(layer)
    own["product"] = product
    if (replacement := FORWARDS.get(type(layer).forward)) is not None:
        own["forward"] = MethodType(replacement, layer)


def linear(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None, products: list[Product] | None = None
) -> Tensor:
    """Return `F.linear(x, weight, bias)` for a layer whose weight gradient may be deferred.

    Args:
        x: [..., in].
        weight: [out, in], a parameter of the layer or a view of one.
        products: collects the operands of the weight gradient, if no schedule defers it.

    Returns:
        [..., out].
    """
    product: LayerProduct | None = getattr(layer, "product", None)
    if product is not None:
        return product(layer, x, weight, bias)
    gradients: DeferredGradients | None = getattr(layer, "weight_gradients", None)
    # Not by `_linear`, at which torch.compile breaks the graph.
    if gradients is None and products is None:
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias, gradients, products)


@Eager
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gradients: DeferredGradients | None, products: list[Product] | None
) -> Tensor:
    trained = torch.is_grad_enabled() and weight.requires_grad and is_parameter(weight)
    # Autocast would compute the output in another dtype than the weight's, which the backward of `_Linear` cannot mix.
    if not trained or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    return apply(_Linear, x, weight, bias, gradients, products)


def is_parameter(weight: Tensor) -> bool:
    """Return whether a weight is a parameter or a view of one, so that its gradient may come after the backward pass.

    A weight computed from parameters has its own graph, which autograd frees after one backward.
    """
    base = weight._base if weight._is_view() else weight  # noqa: SLF001  # no public names
    return base is not None and base.is_leaf


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(self, x, self.weight, self.bias)


def _forward_transposed(self: Conv1D, x: Tensor) -> Tensor:
    return linear(self, x, self.weight.t(), self.bias)


FORWARDS: Mapping[object, Callable[..., Tensor]] = {nn.Linear.forward: _forward, Conv1D.forward: _forward_transposed}
"""Forward of a foreign layer -> its replacement, which can defer."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradients: DeferredGradients | None,
        products: list[Product] | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Not by save_for_backward: activation checkpointing would return a copy detached from the parameter.
        ctx.weight = weight
        ctx.gradients = gradients
        ctx.products = products
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        # Detached, because a deferred product may keep x longer than the graph that made it lives.
        x = ctx.saved_tensors[0].detach()
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = (rows @ ctx.weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        later = None if ctx.gradients is None else ctx.gradients.keeping
        later = ctx.products if later is None else later
        product = partial(_weight_gradient, x, grad, ctx.weight.stride(0) == 1)
        if later is None:
            (grad_weight,) = product()
        else:
            later.append(Product(product, [ctx.weight]))
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _Later(torch.autograd.Function):
    """Return a scalar whose gradients with respect to weights are the deferred gradients."""

    @staticmethod
    def forward(ctx: Context, compute: Callable[[], Sequence[Tensor]], *weights: Tensor) -> Tensor:
        ctx.compute = compute
        return weights[0].new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, _one: Tensor) -> tuple[Tensor | None, ...]:
        compute = ctx.compute
        # It holds the operands, and `accumulate` keeps all nodes until its last one has run.
        del ctx.compute
        return None, *compute()


def _weight_gradient(x: Tensor, grad: Tensor, transposed: bool) -> tuple[Tensor]:
    # The product that autograd uses for this memory layout of the weight: the other one rounds differently.
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return ((x.t() @ grad).t() if transposed else grad.t() @ x,)
