"""The sum of a residual and the norm that follows it, in one kernel on a GPU.

A decoder layer adds a block's output to the residual, and normalises the sum for the next block:

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

Its forward is rewritten to pass both terms to the norm's module, which also returns their sum. So the module is called
as before, with all hooks that others have on it: ZeRO-3 gathers its weights by one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.extras.fusing import kernels
from harness.extras.fusing.gate_code import compiled, parsed
from harness.extras.fusing.norms import Norm, norm_of, takes_kernel
from harness.parallel.comm import Context

SUM_AND_NORM = "_harness_sum_and_norm"
"""Name under which rewritten code calls `_sum_and_norm`."""
NORMAL = "_harness_normal"
"""Name of a sum's norm in rewritten code, until the family's own statement names it."""


@dataclass(frozen=True)
class NormOfSum:
    """The forward of a norm's module, which takes one tensor, or two and returns their sum and its norm.

    Attributes:
        alone: the module's forward for one tensor.
    """

    norm: Norm
    alone: Callable[..., Tensor]

    def __call__(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of one tensor, or the sum of two and its norm."""
        if len(args) != 2:
            return self.alone(module, *args, **kwargs)
        x, plus = args
        weight, bias = self.norm.parameters_of(module)
        same_dtype = all(each is None or each.dtype == x.dtype for each in (plus, weight, bias))
        if weight is None or x.shape != plus.shape or not same_dtype or not (takes_kernel(x) and takes_kernel(plus)):
            total = x + plus
            return total, self.alone(module, total)
        both: tuple[Tensor, Tensor] = _NormOfSum.apply(x, plus, weight, bias, self.norm.of_row)  # type: ignore[no-untyped-call]
        return both


class _NormOfSum(torch.autograd.Function):
    """Returns x + plus and its norm. Both terms have one gradient: that of the sum itself and of its norm."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, plus: Tensor, weight: Tensor, bias: Tensor | None, how: kernels.RowNorm
    ) -> tuple[Tensor, Tensor]:
        normal, scales, total = kernels.norm(x, weight, bias, how, plus=plus)
        ctx.save_for_backward(total, weight, scales)
        ctx.how, ctx.has_bias = how, bias is not None
        return total, normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, of_total: Tensor, of_normal: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scales = ctx.saved_tensors
        of_sum, of_weight, of_bias = kernels.norm_backward(
            *(of_normal.contiguous(), total, weight, scales, ctx.how),
            has_bias=ctx.has_bias,
            of_total=of_total.contiguous(),
        )
        return of_sum, of_sum, of_weight, of_bias, None


def join_sums(module: nn.Module) -> None:
    """Let the forward of a module add and normalise in one, wherever it normalises a sum by a norm of its own."""
    method = type(module).forward
    if "forward" in vars(module) or not isinstance(method, FunctionType):
        return
    norms = {
        name: norm
        for name, child in module.named_children()
        if "forward" not in vars(child) and (norm := _norm_of(child)) is not None and norm.weight is not None
    }
    changed = _rewritten(method, frozenset(norms)) if norms else None
    if changed is None:
        return
    forward, joined = changed
    module.forward = MethodType(forward, module)
    for name in joined:
        child = module.get_submodule(name)
        alone = norms[name] if norm_of(child) is not None else type(child).forward
        child.forward = MethodType(NormOfSum(norms[name], alone), child)


def _norm_of(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes, torch's own layer norm included."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.weight is not None:
        return Norm(True, "weight", None if module.bias is None else "bias", 0.0, module.eps)
    return norm_of(module)


def _sum_and_norm(norm: nn.Module, x: Tensor, plus: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + plus and its norm."""
    # A module that has taken the norm's place since the layer was rewritten knows nothing of sums.
    if isinstance(getattr(norm.forward, "__func__", None), NormOfSum):
        both: tuple[Tensor, Tensor] = norm(x, plus)
        return both
    total = x + plus
    return total, norm(total)


@cache
def _rewritten(function: FunctionType, norms: Collection[str]) -> tuple[FunctionType, frozenset[str]] | None:
    """Return a function that calls `_sum_and_norm`, and for which norms; None if it normalises no sum."""
    # transformers wraps the forward of layers that can be recomputed.
    inner = getattr(function, "__wrapped__", function)
    if not isinstance(inner, FunctionType) or hasattr(inner, "__wrapped__") or inner.__closure__:
        return None
    if (tree := parsed(inner)) is None or tree.decorator_list:
        return None
    joined = {name for block in _blocks(tree) for name in _join(block, norms)}
    if not joined:
        return None
    changed = compiled(tree, inner, {SUM_AND_NORM: _sum_and_norm})
    return (changed if inner is function else _wrapped_as(function, changed)), frozenset(joined)


def _wrapped_as(function: FunctionType, changed: FunctionType) -> FunctionType:
    """Return a copy of a function that wraps another, which wraps `changed` instead."""
    closure = tuple(
        CellType(changed) if cell.cell_contents is function.__wrapped__ else cell  # type: ignore[attr-defined]
        for cell in function.__closure__ or ()
    )
    code = function.__code__.replace()  # a code of its own, for torch.compile keeps what it has compiled with the code
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return wraps(changed)(copied)  # type: ignore[return-value]


def _blocks(tree: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """Yield the lists of statements of a function."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _join(block: Sequence[ast.stmt], norms: Collection[str]) -> Iterator[str]:
    """Change `x = a + b` to `x, _normal = _sum_and_norm(self.norm, a, b)`, and `y = self.norm(x)` to `y = _normal`.

    Yields the names of these norms.
    """
    for at, statement in enumerate(block):
        match statement:
            case ast.Assign(targets=[ast.Name(id=total)], value=ast.BinOp(left=x, op=ast.Add(), right=plus)):
                if (found := _normalised(total, block[at + 1 :], norms)) is not None:
                    following, norm = found
                    both: list[ast.expr] = [ast.Name(name, ast.Store()) for name in (total, NORMAL)]
                    statement.targets = [ast.Tuple(both, ast.Store())]
                    statement.value = ast.Call(ast.Name(SUM_AND_NORM, ast.Load()), [norm, x, plus], [])
                    following.value = ast.Name(NORMAL, ast.Load())
                    yield norm.attr


def _normalised(
    total: str, statements: Sequence[ast.stmt], norms: Collection[str]
) -> tuple[ast.Assign, ast.Attribute] | None:
    """Return the statement that normalises a sum, and its norm; None if it does not follow, save for other names."""
    names = {total}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=new)], value=ast.Name(id=old)) if old in names:
                names.add(new)
            case ast.Assign(
                targets=[ast.Name()],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self")) as norm, args=[ast.Name(id=given)], keywords=[]
                ),
            ) if given in names and norm.attr in norms:
                return statement, norm
            case _:
                return None
    return None
