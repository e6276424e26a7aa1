"""Norms, rotary embeddings and gated activations with fewer passes over memory than in transformers' models.

transformers computes each with many small operations: a norm is square, mean, root, product, product. Each reads and
writes a whole hidden state, needs two or three more in the backward pass, and takes Python some microseconds to launch.

- On a GPU a norm is torch's fused norm, and the others are kernels in Triton. They give transformers' numbers up to the
  rounding of the dtype. They are found by trial, and in the code of a forward: gates, and sums that a norm follows.
- On a CPU, in float32, the forward of a norm reads the hidden state twice, and a rotation changes each half of a head
  in one operation. In 16 bits transformers' own code runs there: fewer operations would round differently. A norm or
  rotation is replaced only if its code equals, token for token, the code that `fused.json` names, as in most families.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.extras.fusing import kernels
from harness.extras.fusing.activations import fused_activation
from harness.extras.fusing.found_gates import gated
from harness.extras.fusing.gate_code import parsed
from harness.extras.fusing.gated_norms import gated_norm_of
from harness.extras.fusing.norms import norm_of
from harness.extras.fusing.residual_norms import join_sums
from harness.extras.fusing.rotations import rotations
from harness.parallel.comm import Context

REPLACED: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Purpose -> code of transformers, as `module:name`."""
ROTATION, HALF = (REPLACED[key].rpartition(":")[2] for key in ("rotation", "half"))


def fuse(layer: nn.Module, device: torch.device) -> None:
    """Fuse the norms, rotary embeddings and gated activations of a layer on `device`.

    Other models of the same family in this process are unchanged.
    """
    change = _fuse_on_gpu if kernels.usable(device) else _fuse_on_cpu
    for module in layer.modules():
        if "forward" not in vars(module):
            change(module)


def _fuse_on_gpu(module: nn.Module) -> None:
    for find in (norm_of, gated_norm_of, fused_activation):
        if (found := find(module)) is not None:
            module.forward = MethodType(found, module)
            return
    for name, method in gated(module).items():
        setattr(module, name, MethodType(method, module))
    join_sums(module)
    forward = getattr(vars(module).get("forward"), "__func__", type(module).forward)
    if isinstance(forward, FunctionType) and (fused := rotations(forward)):
        module.forward = MethodType(with_globals(forward, fused), module)


def _fuse_on_cpu(module: nn.Module) -> None:
    forward: object = type(module).forward
    if _reads_as(forward, "norm"):
        module.forward = MethodType(_norm, module)
    elif reads_globals(forward, [ROTATION]) and (rotate := _fused_rotation(forward)) is not None:
        module.forward = MethodType(with_globals(forward, {ROTATION: rotate}), module)


def with_globals(function: FunctionType, values: Mapping[str, object]) -> FunctionType:
    """Return a copy of a function that reads `values` instead of its module's globals of these names."""
    scope = {**function.__globals__, **values}
    scope.pop("__name__", None)  # torch.compile would look for these values in the module of this name
    # torch.compile keeps what it has compiled with the code, and its name in the globals: no code may have two globals.
    code = function.__code__.replace()
    copied = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return wraps(function)(copied)  # type: ignore[return-value]


def reads_globals(function: object, names: Iterable[str]) -> TypeGuard[FunctionType]:
    """Return whether a plain function's own code, without decorators, reads one of these globals."""
    return isinstance(function, FunctionType) and not set(names).isdisjoint(function.__code__.co_names)


class RMSNorm(torch.autograd.Function):
    """Divides `hidden` [..., n] by the root of its mean square, and multiplies it by `weight` [n], all in float32.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = length.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        normal: Tensor = hidden * scale
        return normal.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        normal = hidden * scale
        of_weight = of_hidden = None
        product = grad * normal
        if ctx.needs_input_grad[1]:
            of_weight = product.reshape(-1, weight.numel()).sum(0)
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).unsqueeze(-1).div_(-weight.numel())
            of_hidden = (grad * weight).addcmul_(normal, mean).mul_(scale)
        return of_hidden, of_weight, None


class Rotation(torch.autograd.Function):
    """Rotates `x` [..., n], n even, by angles whose `cos` and `sin` broadcast to it.

    Dimension i is rotated with dimension i + n / 2 (Su et al. 2021, arXiv 2104.09864). Angles get no gradient.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, -1)
        return _turned(x, cos, -1, first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return _turned(grad, cos, 1, second, first), None, None


def _turned(x: Tensor, cos: Tensor, sign: int, into_first: Tensor, into_second: Tensor) -> Tensor:
    """Return x * cos + [sign * x2 * into_first, -sign * x1 * into_second], where x1 and x2 are the halves of x."""
    turned = x * cos
    of_x, of_turned = x.chunk(2, -1), turned.chunk(2, -1)
    of_turned[0].addcmul_(of_x[1], into_first, value=sign)
    of_turned[1].addcmul_(of_x[0], into_second, value=-sign)
    return turned


class _Norm(Protocol):
    """The attributes of Llama's norm."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor: ...


def _norm(self: _Norm, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32 or self.weight.dtype != torch.float32:
        return type(self).forward(self, hidden_states)
    normal: Tensor = RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
    return normal


def _fused_rotation(forward: FunctionType) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return a fused form of the rotation that `forward` calls; None if its code is not that of `fused.json`."""
    plain: Any = forward.__globals__.get(ROTATION)
    half = getattr(plain, "__globals__", {}).get(HALF)
    return _fused(plain) if _reads_as(half, "half") and _reads_as(plain, "rotation") else None


def _fused(plain: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a family's `apply_rotary_pos_emb`, fused for angles in float32 as wide as heads."""

    @wraps(plain)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        width, dtypes = q.shape[-1], {each.dtype for each in (q, k, cos, sin)}
        fits = width == k.shape[-1] == cos.shape[-1] == sin.shape[-1] and dtypes == {torch.float32}
        if type(q) is not Tensor or not fits or width % 2 or cos.requires_grad or sin.requires_grad:
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)  # type: ignore[no-untyped-call]

    return rotate


@cache
def _reads_as(function: object, replaced: str) -> bool:
    """Return whether a function's code equals the code to replace, except for comments and types."""
    return function is not None and (found := _code(function)) is not None and found == _code_of(replaced)


@cache
def _code(function: Any) -> tuple[str, ...] | None:
    if (tree := parsed(function)) is None:
        return None
    names = [argument.arg for argument in tree.args.args]
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return (*names, *(ast.dump(statement) for statement in body))


@cache
def _code_of(replaced: str) -> tuple[str, ...] | None:
    try:
        return _code(resolve_name(REPLACED[replaced]))
    except (ImportError, AttributeError):  # another version of transformers: nothing is replaced
        return None
