"""What a plan makes of a parameter that it names itself, not by the linear layer that owns it."""

from __future__ import annotations

from torch import nn

from harness.config.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.heads import require_width
from harness.parallel.plan import Rule
from harness.parallel.shard import cut_parameter, share_of


def cut_bare_parameter(param: nn.Parameter, name: str, rule: Rule, tensor: TensorParallel) -> nn.Parameter:
    """This rank's part of a parameter that the plan itself names (fused experts, attention sinks): its
    outputs are the last dimension but one, or the only one; its inputs the last; or `rule.dim` tells."""
    shape, style, dim = tuple(param.shape), rule.style, rule.dim
    if style == "replicate" or (style in ("rowwise", "packed_rowwise") and len(shape) == 1):
        return param
    if style not in ("colwise", "packed_colwise", "rowwise", "packed_rowwise"):
        raise UserError(f"the tensor-parallel style {style} of {name} is not one for a parameter: mend the plan")
    parts = rule.parts if style.startswith("packed") else 1
    if dim is None:
        dim = max(len(shape) - 2, 0) if style.endswith("colwise") else len(shape) - 1
    require_width(shape[dim] // parts, tensor.size, name)
    return cut_parameter(param, share_of(shape, dim, tensor.rank, tensor.size, parts=parts))


def divide_parameter(owner: nn.Module, name: str, size: int) -> None:
    """Let the forward of `owner` see a `size`-th of its whole parameter `name`, which it adds to a partial sum on every
    rank. The parameter itself keeps name and value."""
    kind = type(owner)
    part = property(lambda self: self._parameters[name] / size)
    owner.__class__ = type(kind.__name__, (kind,), {name: part, "__module__": kind.__module__})
