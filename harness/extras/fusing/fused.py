"""Norms, rotary embeddings and gated activations with fewer passes over memory than in transformers' models.

transformers computes each with many small operations: a norm is square, mean, root, product, product. Each reads and
writes a whole hidden state, needs two or three more in the backward pass, and takes Python some microseconds to launch.

- On a GPU a norm is torch's fused norm, and the others are kernels of `harness/device/kernels`. They give
  transformers' numbers up to the last bit of the dtype.
- On a CPU, in float32, the forward of a norm reads the hidden state twice, and a rotation changes each half of a head
  in one operation. In 16 bits transformers' own code runs there: fewer operations would round differently.

A norm or rotation is replaced only if its code equals, token for token, the code that `fused.json` names, which most
families share. On a GPU, so are `x * cos + rotate_half(x) * sin` in families that rotate a part of a head, and any
product of `self.act_fn(...)` with something else, a gated activation.
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
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import ACT2FN

from harness.device import kernels
from harness.parallel.comm import Context

REPLACED: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Purpose -> code of transformers, as `module:name`."""
ROTATION, HALF = (REPLACED[key].rpartition(":")[2] for key in ("rotation", "half"))
GATE, TURN = "_harness_gate", "_harness_turn"
"""Names under which rewritten code calls `_gate` and `_turn`."""
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Activations of transformers -> those of `kernels.gate`."""


def fuse(layer: nn.Module, device: torch.device) -> None:
    """Fuse the RMS norms, rotary embeddings and gated activations of a layer on `device`.

    Other models of the same family in this process are unchanged.
    """
    has_kernels = kernels.usable(device)
    for module in layer.modules():
        if "forward" in vars(module):
            continue
        forward: object = type(module).forward
        if _reads_as(forward, "norm"):
            module.forward = MethodType(_norm_of_torch if has_kernels else _norm, module)
        elif has_kernels and _reads_as(forward, "offset norm") and _reads_as(vars(type(module)).get("_norm"), "root"):
            module.forward = MethodType(_offset_norm, module)
        elif reads_globals(forward, [ROTATION]):
            if (rotate := _fused_rotation(forward, has_kernels)) is not None:
                module.forward = MethodType(with_globals(forward, {ROTATION: rotate}), module)
        elif has_kernels and (gated := _rewritten(forward, GATE, tuple(_activations(module)))) is not None:
            module.forward = MethodType(gated, module)


def with_globals(function: FunctionType, values: Mapping[str, object]) -> FunctionType:
    """Return a copy of a function that reads `values` instead of its module's globals of these names."""
    scope = {**function.__globals__, **values}
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
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


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, cos: Tensor, sin: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(heads, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dense = [each if each.stride(-1) == 1 else each.contiguous() for each in grads]
        return None, None, *kernels.rotate(dense, *ctx.saved_tensors, backward=True)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gates: Tensor, ups: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gates, ups)
        ctx.activation = activation
        return kernels.gate(gates, ups, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, ups = ctx.saved_tensors
        return *kernels.gate_backward(grad.contiguous(), gates, ups, ctx.activation), None


class _Norm(Protocol):
    """The attributes of transformers' norms."""

    weight: Tensor
    variance_epsilon: float  # Llama's
    eps: float  # Gemma's

    def forward(self, hidden_states: Tensor) -> Tensor: ...


def _norm(self: _Norm, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32 or self.weight.dtype != torch.float32:
        return type(self).forward(self, hidden_states)
    normal: Tensor = RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
    return normal


def _norm_of_torch(self: _Norm, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:
        return type(self).forward(self, hidden_states)
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _offset_norm(self: _Norm, x: Tensor) -> Tensor:
    """Return the norm of the Gemma family, which stores weights minus one, in float32."""
    return functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


def _fused_rotation(forward: FunctionType, has_kernels: bool) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return a fused form of the rotation that `forward` calls; None if its halves are not those of `fused.json`."""
    plain: Any = forward.__globals__.get(ROTATION)
    half = getattr(plain, "__globals__", {}).get(HALF)
    if not _reads_as(half, "half"):
        return None
    if _reads_as(plain, "rotation"):
        return _fused(plain, has_kernels)
    return _rewritten(plain, TURN) if has_kernels else None  # families that rotate a part of each head


def _fused(plain: Callable[..., tuple[Tensor, Tensor]], has_kernels: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a family's `apply_rotary_pos_emb`, fused for angles as wide as heads and of the same dtype.

    Without kernels that dtype must be float32.
    """

    @wraps(plain)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        width, dtype = q.shape[-1], q.dtype
        fits = width == k.shape[-1] == cos.shape[-1] == sin.shape[-1] and dtype == k.dtype == cos.dtype == sin.dtype
        if type(q) is not Tensor or not fits or width % 2 or cos.requires_grad or sin.requires_grad:
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        dense = q.stride(-1) == k.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
        if has_kernels and dense and unsqueeze_dim == 1 and (q.dim(), cos.dim()) == (4, 3):
            pair: tuple[Tensor, Tensor] = _Rotated.apply(cos, sin, q, k)  # type: ignore[no-untyped-call]
            return pair
        if q.dtype != torch.float32:
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)  # type: ignore[no-untyped-call]

    return rotate


def _activations(module: nn.Module) -> Iterable[tuple[str, str]]:
    """Yield (attribute, name in `kernels.gate`) of a module's supported activations."""
    for attribute, child in module.named_children():
        for name, ours in ACTIVATIONS.items():
            known = ACT2FN[name]
            if type(child) is type(known) and str(vars(child).get("act")) == str(vars(known).get("act")):
                yield attribute, ours
                break


def _gate(activation: str, plain: nn.Module, gates: Tensor, ups: Tensor) -> Tensor:
    """Return plain(gates) * ups, by one kernel if it applies."""
    both = type(gates) is Tensor and type(ups) is Tensor
    fits = both and gates.dtype == ups.dtype and gates.shape == ups.shape and gates.numel()
    if not fits or kernels.row_stride(gates) is None or kernels.row_stride(ups) is None:
        product: Tensor = plain(gates) * ups
        return product
    gated: Tensor = _Gate.apply(gates, ups, activation)  # type: ignore[no-untyped-call]
    return gated


def _turn(half: Callable[[Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x * cos + half(x) * sin, by one kernel if it applies."""
    fits = type(x) is Tensor and x.dtype == cos.dtype == sin.dtype and x.dim() == 4 and x.shape[-1] % 2 == 0
    of_heads = [(batch, 1, *x.shape[2:]) for batch in (1, len(x))]  # angles of all samples, or of each
    fits = fits and cos.shape == sin.shape and tuple(cos.shape) in of_heads
    dense = fits and x.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    if not dense or cos.requires_grad or sin.requires_grad:
        return x * cos + half(x) * sin
    (turned,) = _Rotated.apply(cos.squeeze(1), sin.squeeze(1), x)  # type: ignore[no-untyped-call]
    return turned  # type: ignore[no-any-return]


class _WithTurns(ast.NodeTransformer):
    """Turns `x * cos + rotate_half(x) * sin` into a call of `_turn`."""

    found = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:  # ast's name
        """Replace a sum."""
        self.generic_visit(node)
        match node:
            case ast.BinOp(
                left=ast.BinOp(left=ast.Name() as x, op=ast.Mult(), right=ast.Name() as cos),
                op=ast.Add(),
                right=ast.BinOp(
                    left=ast.Call(func=ast.Name(id=name) as half, args=[ast.Name() as turned], keywords=[]),
                    op=ast.Mult(),
                    right=ast.Name() as sin,
                ),
            ) if name == HALF and turned.id == x.id:
                self.found += 1
                return ast.copy_location(ast.Call(ast.Name(TURN, ast.Load()), [half, x, cos, sin], []), node)
        return node


class _WithGates(ast.NodeTransformer):
    """Turns `self.act_fn(x) * y`, and `y * self.act_fn(x)`, into a call of `_gate`."""

    def __init__(self, activations: Mapping[str, str]) -> None:
        self.activations = activations
        self.found = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:  # ast's name
        """Replace a product."""
        self.generic_visit(node)
        for call, other in ((node.left, node.right), (node.right, node.left)):
            name = self._activation(call)
            if isinstance(node.op, ast.Mult) and name is not None and isinstance(call, ast.Call):
                self.found += 1
                arguments = [ast.Constant(name), call.func, *call.args, other]
                return ast.copy_location(ast.Call(ast.Name(GATE, ast.Load()), arguments, []), node)
        return node

    def _activation(self, node: ast.expr) -> str | None:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[_], keywords=[]):
                return self.activations.get(name)
        return None


@cache
def _rewritten(function: object, by: str, activations: tuple[tuple[str, str], ...] = ()) -> FunctionType | None:
    """Return a function rewritten to call `_gate` or `_turn`; None if nothing applies or it is not a plain function."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__") or function.__closure__:
        return None
    if (tree := _parsed(function)) is None or tree.decorator_list:
        return None
    rewriting = _WithTurns() if by == TURN else _WithGates(dict(activations))
    rewriting.visit(tree)
    if not rewriting.found:
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)  # a traceback shows the family's own line
    module = ast.fix_missing_locations(ast.Module([tree], []))
    scope = {**function.__globals__, GATE: _gate, TURN: _turn}
    exec(compile(module, function.__code__.co_filename, "exec"), scope)  # transformers' code, parsed above
    rewritten: FunctionType = scope[tree.name]
    rewritten.__defaults__, rewritten.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return rewritten


@cache
def _reads_as(function: object, replaced: str) -> bool:
    """Return whether a function's code equals the code to replace, except for comments and types."""
    return function is not None and (found := _code(function)) is not None and found == _code_of(replaced)


def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # made without a file, or by C
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


@cache
def _code(function: Any) -> tuple[str, ...] | None:
    if (tree := _parsed(function)) is None:
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
