"""Gates in the forward of a module: a product of an activation and something else is rewritten to call `_gate`.

Nothing else of the forward changes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.extras.fusing.gates import gate_at_once
from harness.extras.fusing.kernels import Activation, Gate

GATE = "_harness_gate"
"""Name under which rewritten code calls `_gate`."""
FUNCTIONS: Mapping[object, Activation] = {
    functional.silu: Activation("silu"),
    functional.gelu: Activation("gelu"),
    functional.relu: Activation("relu"),
    functional.sigmoid: Activation("sigmoid"),
    torch.sigmoid: Activation("sigmoid"),
}
"""Functions of torch with one argument, and what they compute."""


def _gate(activation: str, beta: float, plain: Callable[[Tensor], Tensor], gates: Tensor, ups: Tensor) -> Tensor:
    """Return plain(gates) * ups, by one kernel if it applies."""
    both = type(gates) is Tensor and type(ups) is Tensor
    fits = both and gates.dtype == ups.dtype and gates.shape == ups.shape
    return gate_at_once(_usual(activation, beta), gates, ups) if fits else plain(gates) * ups


@cache
def _usual(activation: str, beta: float) -> Gate:
    return Gate(Activation(activation, beta))


class _WithGates(ast.NodeTransformer):
    """Turns `self.act_fn(x) * y`, `F.silu(x) * y`, and the same in the other order, into a call of `_gate`."""

    def __init__(self, activations: Mapping[str, Activation], scope: Mapping[str, object]) -> None:
        self.activations, self.scope = activations, scope
        self.found = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:  # ast's name
        """Replace a product."""
        self.generic_visit(node)
        for call, other in ((node.left, node.right), (node.right, node.left)):
            activation = self._activation(call)
            if isinstance(node.op, ast.Mult) and activation is not None and isinstance(call, ast.Call):
                self.found += 1
                constants = [ast.Constant(activation.name), ast.Constant(activation.beta)]
                arguments = [*constants, call.func, *call.args, other]
                return ast.copy_location(ast.Call(ast.Name(GATE, ast.Load()), arguments, []), node)
        return node

    def _activation(self, node: ast.expr) -> Activation | None:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[_], keywords=[]):
                return self.activations.get(name)
            case ast.Call(func=ast.Attribute() | ast.Name() as called, args=[_], keywords=[]):
                return next((found for known, found in FUNCTIONS.items() if self._value(called) is known), None)
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
def rewritten(function: FunctionType, activations: tuple[tuple[str, Activation], ...]) -> FunctionType | None:
    """Return a function that calls `_gate`; None if it gates nothing."""
    if (tree := parsed(function)) is None or tree.decorator_list:
        return None
    rewriting = _WithGates(dict(activations), function.__globals__)
    rewriting.visit(tree)
    if not rewriting.found:
        return None
    return compiled(tree, function, {GATE: _gate})


def compiled(tree: ast.FunctionDef, function: FunctionType, names: Mapping[str, object]) -> FunctionType:
    """Return a changed tree of a function as a function, whose globals have these names besides their own."""
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)  # a traceback shows the family's own line
    module = ast.fix_missing_locations(ast.Module([tree], []))
    scope = {**function.__globals__, **names}
    scope.pop("__name__", None)  # torch.compile would look for these names in the module of this name
    exec(compile(module, function.__code__.co_filename, "exec"), scope)  # transformers' code, parsed by `parsed`
    made: FunctionType = scope[tree.name]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def parsed(function: Any) -> ast.FunctionDef | None:
    """Return the syntax tree of a function; None if it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # made without a file, or by C
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None
