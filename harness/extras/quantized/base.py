"""The frozen linear layers of a base model in 4 bits.

The linear layers that transformers quantises (`BitsAndBytesConfig`) keep their frozen weights as bytes, which a product
dequantises when it needs them, forward and backward. The head stays as it is, and so do layers that are trained, fused
experts, and linear layers with a forward of their own.

Each layer is first filled in the run's dtype, then quantised whole and cut: so the values are those of one process in
every layout. A layer that a rank cannot hold as bytes, because its forward reads the weight itself, gets the quantised
values in the run's dtype.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from harness.errors import UserError
from harness.hf.weights.layer_weights import (
    CheckpointReader,
    Initialiser,
    NoValues,
    WeightSource,
    fill_local,
    materialise,
)
from harness.parallel.comm import Context, apply
from harness.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, SharedColumnLinear
from harness.parallel.tensor.shard import Shard, mark, shard_of
from harness.parallel.tensor.shared_input import copy_once
from harness.parallel.weight_gradients import FORWARDS, LayerProduct, replace_product

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

    from harness.extras.quantized.matrix import FourBits, Take

MARK = "is_quantized"
"""Attribute of a layer on meta that is to be quantised."""
INSTALL = "bitsandbytes is not installed: pip install 'ds-harness[quantization]'"


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the frozen weights under adapters are quantised.

    Attributes:
        kind: "nf4" or "fp4".
        double: whether the scales are quantised too.
        compute_dtype: dtype of the products; None for that of their input.
        skipped: names of modules that keep their weights; None for transformers' choice.
    """

    kind: str
    double: bool
    compute_dtype: torch.dtype | None
    skipped: tuple[str, ...] | None

    @classmethod
    def of(cls, config: BitsAndBytesConfig) -> Quantization:
        """Return what transformers' config asks for. Raises UserError if that is not 4 bits."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError(INSTALL)
        if not config.load_in_4bit:
            raise UserError("quantization_config: only load_in_4bit=True is supported: set it, or leave the config out")
        skipped = config.llm_int8_skip_modules
        return cls(
            kind=config.bnb_4bit_quant_type,
            double=config.bnb_4bit_use_double_quant,
            compute_dtype=config.bnb_4bit_compute_dtype,
            skipped=None if skipped is None else tuple(skipped),
        )

    def mark(self, model: PreTrainedModel) -> None:
        """Mark the layers of a model without adapters that are to be quantised, by transformers' rules."""
        kept = [*(get_keys_to_not_convert(model) if self.skipped is None else self.skipped)]
        kept += model._keep_in_fp32_modules or ()  # noqa: SLF001  # transformers' quantizer reads it
        for name, module in model.named_modules():
            is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
            if is_linear and type(module).forward in FORWARDS and should_convert_module(name, kept):
                setattr(module, MARK, True)

    def as_json(self) -> dict[str, object]:
        """Return the settings that change a run's numbers."""
        dtype = None if self.compute_dtype is None else str(self.compute_dtype)
        skipped = None if self.skipped is None else sorted(self.skipped)
        return {"kind": self.kind, "double": self.double, "compute_dtype": dtype, "skipped": skipped}


@dataclass(frozen=True, kw_only=True)
class QuantizedWeights:
    """The weights of layers from `base`, the marked ones quantised."""

    base: WeightSource
    settings: Quantization

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Fill the layer, and quantise its marked linear layers that are not trained. Neither has adapters."""
        source = _reading_all(self.base)
        source.fill(layer, whole)
        marked = dict(_marked(whole))
        if isinstance(source, NoValues):
            for name in marked:
                self._reserve(layer.get_submodule(name))
            return
        if not marked:
            return
        uncut = layer
        if any(shard_of(_weight(layer.get_submodule(name))) is not None for name in marked):
            first = next(layer.parameters())
            uncut = copy.deepcopy(whole)
            materialise(uncut, first.device, _dtype_of(layer, marked))
            source.fill(uncut, whole)
        for name, original in marked.items():
            matrix = uncut.get_submodule(name).get_parameter("weight")
            self._quantise(layer.get_submodule(name), matrix, transposed=isinstance(original, Conv1D))

    def _reserve(self, layer: nn.Module) -> None:
        """Replace the weight of a linear layer in a dry run by as many bytes as it has in 4 bits."""
        from harness.extras.quantized.matrix import reserved

        weight = _weight(layer)
        settings = self.settings
        if not _holds_bytes(layer):
            return
        rows, columns = reversed(weight.shape) if _is_transposed(layer) else weight.shape
        if isinstance(layer, SharedColumnLinear):
            rows = sum(stop - start for start, stop in layer.pieces)
        self._put(layer, *reserved((rows, columns), settings.kind, double=settings.double, device=weight.device))

    def _quantise(self, layer: nn.Module, weight: Tensor, *, transposed: bool) -> None:
        """Replace the weight of a linear layer by this rank's part of the quantised `weight`, which is whole."""
        from harness.extras.quantized.matrix import quantise

        matrix = weight.t() if transposed else weight
        settings = self.settings
        shard = shard_of(_weight(layer))
        if not _holds_bytes(layer):
            form, stored = quantise(matrix, settings.kind, double=settings.double)
            values = form.dequantise(stored, weight.dtype)
            fill_local(_weight(layer), values.t() if transposed else values)
            return
        take = _take(layer, shard, transposed)
        self._put(layer, *quantise(matrix, settings.kind, double=settings.double, take=take))

    def _put(self, layer: nn.Module, form: FourBits, stored: Tensor) -> None:
        """Have a linear layer hold its weight as the bytes `stored` [n], and compute with them."""
        parameter = mark(nn.Parameter(stored, requires_grad=False), shard_of(_weight(layer)))
        layer.register_parameter("weight", parameter)
        replace_product(layer, partial(product, form, self.settings.compute_dtype))
        if isinstance(layer, SharedColumnLinear):
            vars(layer)["forward"] = MethodType(_shared_forward, layer)


def product(
    form: FourBits, dtype: torch.dtype | None, layer: nn.Module, x: Tensor, _weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return y = x A^T + b [..., out] of x [..., in] for a layer that holds A in 4 bits, computed in `dtype`."""
    given = x.dtype
    if dtype is not None:
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    y: Tensor = apply(_Product, x, bias, form, layer)
    return y.to(given)


class _Product(torch.autograd.Function):
    """Dequantises the weight again in the backward pass, so that the graph keeps neither the weight nor the input."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, bias: Tensor | None, form: FourBits, layer: nn.Module) -> Tensor:
        # the layer, not its weight: ZeRO-3 gathers the weight anew for the backward pass
        ctx.form, ctx.layer = form, layer
        return F.linear(x, form.dequantise(layer.get_parameter("weight"), x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.form.dequantise(ctx.layer.get_parameter("weight"), grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_bias, None, None


def _shared_forward(layer: SharedColumnLinear, x: Tensor) -> Tensor:
    """Return the outputs of the layer's pieces: its weight holds only their rows, its bias is whole."""
    bias = None if layer.bias is None else torch.cat([layer.bias[start:stop] for start, stop in layer.pieces])
    product: LayerProduct = vars(layer)["product"]
    return product(layer, copy_once(x, layer.group)[0], layer.weight, bias)


def _take(layer: nn.Module, shard: Shard | None, transposed: bool) -> Take | None:
    """Return what cuts the rows and columns that `layer` holds out of a whole matrix [out, in]."""
    if isinstance(layer, SharedColumnLinear):
        pieces = layer.pieces
        return lambda matrix: torch.cat([matrix[start:stop] for start, stop in pieces])
    if shard is None:
        return None
    if transposed:
        return lambda matrix: shard.take(matrix.t()).t()
    return shard.take


def _holds_bytes(layer: nn.Module) -> bool:
    """Return whether a layer's forward is one product with its weight, so that it need not see the weight itself."""
    shard = shard_of(_weight(layer))
    if shard is not None and shard.padding:
        return False
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear | SharedColumnLinear):
        return True
    return type(layer).forward in FORWARDS and not isinstance(getattr(type(layer), "weight", None), property)


def _is_transposed(layer: nn.Module) -> bool:
    return isinstance(layer, Conv1D) or getattr(layer, "weight_transposed", False)


def _weight(layer: nn.Module) -> nn.Parameter:
    """Return the weight as the layer holds it, whatever its attribute shows."""
    return dict(layer.named_parameters(recurse=False))["weight"]


def _dtype_of(layer: nn.Module, names: dict[str, nn.Module]) -> torch.dtype:
    """Return the dtype of the weights of these layers."""
    return next(_weight(layer.get_submodule(name)).dtype for name in names)


def _marked(whole: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the frozen layers that are to be quantised, by name."""
    for name, module in whole.named_modules():
        if getattr(module, MARK, False) and not module.get_parameter("weight").requires_grad:
            yield name, module


def _reading_all(source: WeightSource) -> WeightSource:
    """Return a source that fills whole parameters also under ZeRO-3: a part has no blocks of its own."""
    if isinstance(source, CheckpointReader):
        return replace(source, part=None, initialiser=replace(source.initialiser, part=None))
    return replace(source, part=None) if isinstance(source, Initialiser) else source
