"""The three products of a linear layer in fp8, with a scale for each row that is summed over.

After torchao's rowwise recipe. A layer computes y = x A^T + b, and backward dx = dy A and dA = dy^T x. Each product
gets both operands in e4m3, with a scale for each row of the left one and each column of the right one: see `e4m3.py`.
Results have the dtype of x. The parameter, its gradient and the update stay as they are.

An operand is read once for both of its products: x is rounded by rows and by columns, the second for dA, and so is dy.

- Layers that read one input, as query, key and value do, use the same codes of it. Their products backward are computed
  together: dx is one sum over the outputs of all of them, and so is dA of all rows.
- Weights are rounded once a step, if a step reads them several times.

Where tensor-parallel ranks share the sum of a product, they share its scales: each is made of the largest element on
any rank. So the codes are those of the whole layer. Ranks exchange these maxima of an activation in each such product,
of a weight once a step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.extras.fp8.e4m3 import Codes
from harness.extras.fp8.operations import AT_ONCE, largest_of_rows, round_rows, round_rows_and_columns
from harness.parallel.collectives import all_reduce_max
from harness.parallel.comm import Context, apply, group_size
from harness.parallel.compiling import Eager
from harness.parallel.weight_gradients import DeferredGradients, Product, accumulate, is_parameter
from harness.resilience.process.activity import ACTIVITY

Multiply: TypeAlias = Callable[[Codes, Codes, torch.dtype], Tensor]
"""Returns a b^T [m, n] in a dtype, of a [m, k] and b [n, k]."""


def on_device(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """Multiply by the device's own kernel; see `Multiply`.

    With fast accumulation, as torchao does: without it, the kernels for scales by row are slow on Hopper.
    """
    return torch._scaled_mm(  # noqa: SLF001  # torch has no public name for it
        a.codes, b.codes.t(), scale_a=a.factors, scale_b=b.factors.t(), out_dtype=dtype, use_fast_accum=True
    )


def emulated(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """Multiply the codes in float32, in which each is exact, on any device; see `Multiply`."""
    return ((a.codes.float() @ b.codes.float().t()) * a.factors * b.factors.t()).to(dtype)


class _LayerBackward(NamedTuple):
    """What a layer's products backward are made of.

    Attributes:
        grad: dy [tokens, out].
        x: the codes of the input by column, [in, tokens]; None for a frozen weight.
        step: the step for which codes of the weight [out, in] may be kept, or 0.
        deferred: the deferred weight gradients of the stage; None if its schedule defers none.
    """

    product: Fp8Product
    grad: Tensor
    x: Codes | None
    weight: Tensor
    step: int
    deferred: DeferredGradients | None

    @property
    def kept(self) -> list[Product] | None:
        """The list that collects deferred products; None if this layer's is computed at once."""
        return None if self.deferred is None or not is_parameter(self.weight) else self.deferred.keeping


@dataclass(kw_only=True, eq=False)
class Fp8Product:
    """Computes the output of a linear layer.

    Attributes:
        multiply: multiplies codes.
        group: the tensor-parallel ranks that share the layer; None if each has all of it.
        cut_inputs: whether they have a part of its inputs each, not of its outputs.
        keeps_weights: whether the codes of weights are kept for a step.
        joins: whether layers with one input compute their products backward together. Not where DeepSpeed gathers a
            layer's parameters, or expects their gradients, while the layer is computed.
    """

    multiply: Multiply
    group: dist.ProcessGroup | None = None
    cut_inputs: bool = False
    keeps_weights: bool = False
    joins: bool = False
    _kept: dict[str, tuple[Hashable, Codes]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y [..., out] of x [..., in] and the weight [out, in]."""
        step = ACTIVITY.steps if self.keeps_weights and layer.training else 0
        y = _output(self, x, weight, step, getattr(layer, "weight_gradients", None))
        return y if bias is None else y + bias

    def of_inputs(self, x: Tensor, *, columns: bool) -> tuple[Codes, Codes | None]:
        """Return the codes of x [tokens, in] by row and, with `columns`, by column."""
        largest = self._shared([x]) if self.cut_inputs else None
        return round_rows_and_columns([x], largest) if columns else (round_rows([x], largest), None)

    def of_weight(self, weight: Tensor, step: int) -> Codes:
        """Return the codes of a weight by row; `step`: the step for which they may be kept, or 0."""
        return self._of_weights([weight], "row", step, shared=self.cut_inputs)

    def backward(
        self, parts: Sequence[_LayerBackward], *, of_input: bool
    ) -> tuple[Tensor | None, Callable[[], Sequence[Tensor]] | None]:
        """Return dx [tokens, in] of some layers with one input, and what computes dA of each; None for frozen weights.

        What computes dA keeps codes alone, so it may be called later.
        """
        grads = [part.grad for part in parts]
        weights = [part.weight for part in parts]
        x = next((part.x for part in parts if part.x is not None), None)
        dtype = weights[0].dtype
        of_x, by_column = None, None
        if of_input:
            largest = None if self.cut_inputs else self._shared(grads)
            if x is None:
                by_row = round_rows(grads, largest)
            else:
                by_row, by_column = round_rows_and_columns(grads, largest)
            of_rows = self._of_weights([weight.t() for weight in weights], "column", parts[0].step, not self.cut_inputs)
            of_x = self.multiply(by_row, of_rows, dtype)
        if x is None:
            return of_x, None
        if by_column is None:
            (grad,) = grads
            by_column = round_rows([grad.t()])
        return of_x, partial(self._of_rows, by_column, x, dtype, [len(weight) for weight in weights])

    def _of_rows(self, grads: Codes, x: Codes, dtype: torch.dtype, rows: list[int]) -> Sequence[Tensor]:
        """Return dA of some layers, of the codes by column of all their dy, and of x."""
        found: Sequence[Tensor] = self.multiply(grads, x, dtype).split(rows)
        return found

    def _of_weights(self, weights: Sequence[Tensor], form: str, step: int, shared: bool) -> Codes:
        if not step:
            return round_rows(weights, self._shared(weights) if shared else None)
        as_of = (step, *((weight.data_ptr(), weight._version) for weight in weights))  # noqa: SLF001  # no public name
        if form not in self._kept or self._kept[form][0] != as_of:
            self._kept[form] = as_of, self._of_weights(weights, form, 0, shared)
        return self._kept[form][1]

    def _shared(self, matrices: Sequence[Tensor]) -> Tensor | None:
        """Return the largest element of each row on any rank of the group; None without a group."""
        if self.group is None or group_size(self.group) == 1:
            return None
        return all_reduce_max(largest_of_rows(matrices), self.group)


@dataclass(eq=False)
class _JoinedLayers:
    """The layers that read one input: how many compute their products backward together, and those that have begun."""

    count: int = 0
    parts: list[_LayerBackward] = field(default_factory=list)


@dataclass(eq=False)
class _RoundedInput:
    """The input of one or more layers, and its codes.

    Attributes:
        x: the input itself, [..., in]; None once a backward pass has begun, or its graph would outlive the step.
        copy: the same for the layers: its graph node computes their products backward, if they do so together.
        about: all else that layers must have in common to share it.
        recorded: whether there will be a backward pass.
    """

    x: Tensor | None = None
    copy: Tensor | None = None
    about: tuple[object, ...] = ()
    recorded: bool = False
    codes: tuple[Codes, Codes | None] | None = None
    layers: _JoinedLayers = field(default_factory=_JoinedLayers)

    def of(self, product: Fp8Product, x: Tensor, *, columns: bool) -> tuple[Codes, Codes | None]:
        """Return the codes of the input by row and, with `columns`, by column."""
        if self.codes is None or (columns and self.codes[1] is None):
            self.codes = product.of_inputs(x.reshape(-1, x.shape[-1]), columns=columns)
        return self.codes

    def forget(self) -> None:
        """Drop the tensors."""
        self.x = self.copy = self.codes = None


@dataclass
class _LatestInput(threading.local):
    """The latest input of this thread's layers."""

    input: _RoundedInput = field(default_factory=_RoundedInput)


_LATEST = _LatestInput()


@Eager
def _output(product: Fp8Product, x: Tensor, weight: Tensor, step: int, deferred: DeferredGradients | None) -> Tensor:
    shared = _input_of(product, x)
    return apply(_Fp8Linear, shared.copy, weight, product, shared, step, deferred)


def _input_of(product: Fp8Product, x: Tensor) -> _RoundedInput:
    """Return what the layers before this one have made of the same input; a new one if they had another."""
    recorded = torch.is_grad_enabled()
    version = 0 if x.is_inference() else x._version  # noqa: SLF001  # no public name
    about = (version, recorded, product.joins, product.group if product.cut_inputs else None)
    if _LATEST.input.x is not x or _LATEST.input.about != about:
        found = _RoundedInput(x=x, copy=x, about=about, recorded=recorded)
        if product.joins and recorded and x.requires_grad:
            found.copy = apply(_CopyForLayers, x, found.layers)
        _LATEST.input = found
    return _LATEST.input


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        product: Fp8Product,
        shared: _RoundedInput,
        step: int,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        trained = shared.recorded and weight.requires_grad
        by_row, by_column = shared.of(product, x, columns=trained)
        if by_column is not None and trained:
            ctx.save_for_backward(*by_column)
        # Not by save_for_backward: activation checkpointing would return a copy detached from the parameter.
        ctx.weight = weight
        ctx.product = product
        ctx.step = step
        ctx.deferred = deferred
        ctx.input = weakref.ref(shared)
        ctx.layers = shared.layers
        ctx.joins = product.joins and x.requires_grad and (not trained or is_parameter(weight))
        ctx.layers.count += ctx.joins
        ctx.shape = x.shape
        return product.multiply(by_row, product.of_weight(weight, step), x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x = Codes(*ctx.saved_tensors) if ctx.saved_tensors else None
        for shared in (ctx.input(), _LATEST.input):  # the second is of a recomputed layer
            if shared is not None:
                shared.forget()
        product: Fp8Product = ctx.product
        rows = grad.reshape(-1, grad.shape[-1])
        part = _LayerBackward(product, rows, x, ctx.weight, ctx.step, ctx.deferred)
        if ctx.joins and ctx.layers.count > 1:
            ctx.layers.parts.append(part)
            return None, None, None, None, None, None
        of_x, of_weights = product.backward([part], of_input=ctx.needs_input_grad[0])
        of_weight = None
        if of_weights is not None:
            if part.kept is None:
                (of_weight,) = of_weights()
            else:
                part.kept.append(Product(of_weights, [ctx.weight]))
        return None if of_x is None else of_x.view(ctx.shape), of_weight, None, None, None, None


class _CopyForLayers(torch.autograd.Function):
    """Returns the input of some layers; computes their products backward, once the gradients of all outputs are there.

    Their weights' gradients pass through the hooks of the parameters like any others: see `weight_gradients.py`.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, layers: _JoinedLayers) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layers = layers
        ctx.shape = x.shape
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor | None) -> tuple[Tensor | None, None]:
        layers: _JoinedLayers = ctx.layers
        parts = layers.parts
        layers.parts = []
        for start in range(0, len(parts), AT_ONCE):
            some = parts[start : start + AT_ONCE]
            of_x, of_weights = some[0].product.backward(some, of_input=True)
            if of_weights is not None:
                later = Product(of_weights, [part.weight for part in some])
                if some[0].kept is None:
                    accumulate([later])
                else:
                    some[0].kept.append(later)
            if of_x is not None:
                of_x = of_x.view(ctx.shape)
                grad = of_x if grad is None else grad + of_x
        return grad, None
