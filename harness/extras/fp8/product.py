"""The three products of a linear layer in fp8, with a scale for each row that is summed over.

After torchao's rowwise recipe. A layer computes y = x A^T + b, and backward dx = dy A and dA = dy^T x. Each product
gets both operands in e4m3 (Micikevicius et al. 2022, arXiv 2209.05433). Each row of the left one and each column of the
right one has a scale of its own, found anew in each product: the largest power of two with which no element exceeds the
range. Sums are in float32, results in the dtype of x. The parameter, its gradient and the update stay as they are.

Where tensor-parallel ranks share the sum of a product, they share its scales: each is made of the largest element on
any rank. So the codes are those of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from harness.config.values.arguments import FP8_MULTIPLE
from harness.parallel.comm import Context, apply, group_size
from harness.parallel.compiling import Eager

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST = 1e-12
"""The least that a row's largest element is taken for: rows of zeros have a scale, too."""

Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""Returns a b^T / (of_a of_b^T) [m, n] in a dtype, of e4m3 codes a [m, k], b [n, k] and their scales [m, 1], [n, 1]."""


def on_device(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply by the device's own kernel; see `Multiply`."""
    extra = -a.shape[1] % FP8_MULTIPLE  # tokens, in the product of a weight's gradient
    if extra:
        a, b = (pad(each.view(torch.uint8), (0, extra)).view(E4M3) for each in (a, b))
    return torch._scaled_mm(  # noqa: SLF001  # torch has no public name for it
        a.contiguous(), b.contiguous().t(), scale_a=1 / of_a, scale_b=1 / of_b.t(), out_dtype=dtype
    )


def emulated(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the codes in float32, in which each is exact, on any device; see `Multiply`."""
    return ((a.float() @ b.float().t()) / of_a / of_b.t()).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Fp8Product:
    """Computes the output of a linear layer.

    Attributes:
        multiply: multiplies codes.
        group: the tensor-parallel ranks that share the layer; None if each has all of it.
        cut_inputs: whether they have a part of its inputs each, not of its outputs.
    """

    multiply: Multiply
    group: dist.ProcessGroup | None = None
    cut_inputs: bool = False

    def __call__(self, _layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y [..., out] of x [..., in] and the weight [out, in]."""
        y: Tensor = apply(_RowwiseProduct, x, weight, self)
        return y if bias is None else y + bias

    def of(self, left: Tensor, right: Tensor, dtype: torch.dtype, *, cut: bool = False) -> Tensor:
        """Return left right^T [m, n] of left [m, k] and right [n, k]; `cut`: the ranks share the sum over k."""
        largest = [matrix.abs().amax(dim=1, keepdim=True).float() for matrix in (left, right)]
        if cut and group_size(self.group) > 1:
            largest = _largest_of_group(largest, self.group)
        (a, of_a), (b, of_b) = map(_quantised, (left, right), largest)
        return self.multiply(a, b, of_a, of_b, dtype)


class _RowwiseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, product: Fp8Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product = product
        y = product.of(x.reshape(-1, x.shape[-1]), weight, x.dtype, cut=product.cut_inputs)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        product: Fp8Product = ctx.product
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product.of(rows, weight.t(), x.dtype, cut=not product.cut_inputs).view(x.shape)
        if ctx.needs_input_grad[1]:  # a sum over tokens, of which each tensor-parallel rank has all
            grad_weight = product.of(rows.t(), x.reshape(-1, x.shape[-1]).t(), weight.dtype)
        return grad_x, grad_weight, None


def _quantised(matrix: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [m, k] of a matrix, and the scale [m, 1] of each row, by its largest absolute element [m, 1]."""
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / largest.clamp(min=SMALLEST))))
    return (matrix.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


@Eager
def _largest_of_group(values: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the elementwise maxima of `values` [n, 1] over the ranks of a group."""
    together = torch.cat(list(values))
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    return list(together.split([len(each) for each in values]))
