"""Gated activations of a GPU in one kernel, found by what a family's code computes.

A gate is the product of an activation and something else, in the forward of a module or in the method by which
transformers' experts gate. That method is rewritten to call `_gate` there; nothing else of it changes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import ACT2FN

from harness.extras.fusing import kernels
from harness.parallel.comm import Context

GATE = "_harness_gate"
"""Name under which rewritten code calls `_gate`."""
METHODS = ("forward", "_apply_gate")
"""Methods that may gate; the second is that of experts (transformers.integrations.moe)."""
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Activations of transformers -> those of `kernels.gate`."""
FUNCTIONS: Mapping[object, str] = {functional.silu: "silu", functional.relu: "relu"}
"""Activations of torch -> those of `kernels.gate`."""


def gated(module: nn.Module) -> dict[str, FunctionType]:
    """Return the methods of a module that gate by an activation, rewritten to do so in one kernel."""
    supported = tuple(_activations(module))
    found = {name: _rewritten(getattr(type(module), name, None), supported) for name in METHODS}
    return {name: method for name, method in found.items() if method is not None}


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


def _activations(module: nn.Module) -> Iterable[tuple[str, str]]:
    """Yield (attribute, name in `kernels.gate`) of a module's supported activations."""
    for attribute, child in module.named_children():
        for name, ours in ACTIVATIONS.items():
            known = ACT2FN[name]
            if type(child) is type(known) and str(vars(child).get("act")) == str(vars(known).get("act")):
                yield attribute, ours
                break
    for attribute, value in vars(module).items():
        if isinstance(value, Hashable) and value in FUNCTIONS:
            yield attribute, FUNCTIONS[value]


def _gate(activation: str, plain: Callable[[Tensor], Tensor], gates: Tensor, ups: Tensor) -> Tensor:
    """Return plain(gates) * ups, by one kernel if it applies."""
    both = type(gates) is Tensor and type(ups) is Tensor
    fits = both and gates.dtype == ups.dtype and gates.shape == ups.shape and gates.numel()
    if not fits or kernels.row_stride(gates) is None or kernels.row_stride(ups) is None:
        return plain(gates) * ups
    gated: Tensor = _Gate.apply(gates, ups, activation)  # type: ignore[no-untyped-call]
    return gated


class _WithGates(ast.NodeTransformer):
    """Turns `self.act_fn(x) * y`, `F.silu(x) * y`, and the same in the other order, into a call of `_gate`."""

    def __init__(self, activations: Mapping[str, str], scope: Mapping[str, object]) -> None:
        self.activations, self.scope = activations, scope
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
            case ast.Call(func=ast.Attribute() | ast.Name() as called, args=[_], keywords=[]):
                return next((name for known, name in FUNCTIONS.items() if self._value(called) is known), None)
        return None

    def _value(self, node: ast.expr) -> object:
        """Return what a dotted name stands for in the module; None for anything else."""
        match node:
            case ast.Name(id=name):
                return self.scope.get(name)
            case ast.Attribute(value=owner, attr=name):
                return getattr(self._value(owner), name, None)
        return None


@cache
def _rewritten(function: object, activations: tuple[tuple[str, str], ...]) -> FunctionType | None:
    """Return a function that calls `_gate`; None if it gates nothing, or is not a plain function."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__") or function.__closure__:
        return None
    if (tree := parsed(function)) is None or tree.decorator_list:
        return None
    rewriting = _WithGates(dict(activations), function.__globals__)
    rewriting.visit(tree)
    if not rewriting.found:
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)  # a traceback shows the family's own line
    module = ast.fix_missing_locations(ast.Module([tree], []))
    scope = {**function.__globals__, GATE: _gate}
    exec(compile(module, function.__code__.co_filename, "exec"), scope)  # transformers' code, parsed above
    rewritten: FunctionType = scope[tree.name]
    rewritten.__defaults__, rewritten.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return rewritten


def parsed(function: Any) -> ast.FunctionDef | None:
    """Return the syntax tree of a function; None if it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # made without a file, or by C
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None
