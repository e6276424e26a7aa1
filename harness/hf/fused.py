"""Norms and rotary embeddings in fewer passes over memory than models of transformers make, with the same results.

transformers computes both by many small operations: a norm is square, mean, root, product, product. Each reads and
writes a whole hidden state, and needs two or three more in the backward pass. Here the forward of a norm reads the
hidden state twice, and a rotation changes each half of a head in one operation.

Code is replaced only if it equals, word for word, the code that `fused.json` names, which most families share. It is
replaced only in float32: 16-bit numbers would be rounded differently than in transformers.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType, MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.parallel.comm import Context, apply

REPLACED: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Purpose -> code of transformers, as `module:name`."""
ROTATION, HALF = (REPLACED[key].rpartition(":")[2] for key in ("rotation", "half"))


def fuse(layer: nn.Module) -> None:
    """Make the RMS norms of a layer use `rms_norm`, and its attention use `rotated`.

    Other models of the same family in this process are not changed.
    """
    for module in layer.modules():
        if "forward" in vars(module):
            continue
        forward: object = type(module).forward
        if _reads_as(forward, "norm"):
            module.forward = MethodType(_normalised, module)
        elif reads_globals(forward, [ROTATION]) and (rotate := _fused_rotation(forward)) is not None:
            module.forward = MethodType(with_globals(forward, {ROTATION: rotate}), module)


def with_globals(function: FunctionType, values: Mapping[str, object]) -> FunctionType:
    """Return a copy of a function that reads `values` in place of its module's globals of these names."""
    scope = {**function.__globals__, **values}
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return wraps(function)(copied)  # type: ignore[return-value]


def reads_globals(function: object, names: Iterable[str]) -> TypeGuard[FunctionType]:
    """Return whether a plain function's own code reads one of these globals; decorators are not looked into."""
    return isinstance(function, FunctionType) and not set(names).isdisjoint(function.__code__.co_names)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return `hidden` [..., n] divided by the root of its mean square, times `weight` [n], all in float32.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    return apply(_RMSNorm, hidden, weight, epsilon)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [..., n], n even, rotated by angles whose `cos` and `sin` broadcast to it.

    Dimension i is rotated with dimension i + n / 2 (Su et al. 2021, arXiv 2104.09864). Angles get no gradient.
    """
    return apply(_Rotation, x, cos, sin)


class _RMSNorm(torch.autograd.Function):
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


class _Rotation(torch.autograd.Function):
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


def _normalised(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32 or self.weight.dtype != torch.float32:
        plain: Tensor = type(self).forward(self, hidden_states)
        return plain
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _fused_rotation(forward: FunctionType) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return a fused form of the rotation that `forward` calls; None if it is not the rotation of `fused.json`."""
    plain: Any = forward.__globals__.get(ROTATION)
    half = getattr(plain, "__globals__", {}).get(HALF)
    return _fused(plain) if _reads_as(plain, "rotation") and _reads_as(half, "half") else None


def _fused(plain: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a family's `apply_rotary_pos_emb` with `rotated` where all is float32 and angles are as wide as heads."""

    @wraps(plain)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        fits = {(each.dtype, each.shape[-1]) for each in (q, k, cos, sin)} == {(torch.float32, q.shape[-1])}
        if type(q) is not Tensor or not fits or q.shape[-1] % 2 or cos.requires_grad or sin.requires_grad:
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    return rotate


@cache
def _reads_as(function: object, replaced: str) -> bool:
    """Return whether a function's code equals the code that is replaced, except for comments and types."""
    return function is not None and (found := _code(function)) is not None and found == _code_of(replaced)


@cache
def _code(function: Any) -> tuple[str, ...] | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # made without a file, or by C
        return None
    if not isinstance(tree, ast.FunctionDef):
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
