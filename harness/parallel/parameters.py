"""Parameters that are cut without a layer of their own in their place: those that a plan names itself (fused experts,
attention sinks), and the norms of single heads.

A norm with a weight for each head, (heads, head_dim), is not in the plans. It is found by its shape: it is used with
the heads of a rank, so it is cut like them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from harness.config.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.gradients import sum_gradients, sum_of_copies
from harness.parallel.heads import Heads, require_width
from harness.parallel.plan import Rule
from harness.parallel.segments import cut_segments, read_segments
from harness.parallel.shard import cut_parameter, shard_of, share_of

_STYLES = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")


def cut_bare_parameter(
    owner: nn.Module, own_name: str, name: str, rule: Rule, tensor: TensorParallel, above: Sequence[nn.Module] = ()
) -> None:
    """Keep this rank's part of a parameter of `owner` that the plan itself names `name`: its outputs are the last
    dimension but one, or the only one; its inputs the last; or `rule.dim` tells. `above`: the modules around `owner`,
    the nearest first. Raises UserError for a style that is not a parameter's."""
    if rule.style == "divided":
        divide_parameter(owner, own_name, tensor.size)
        return
    param = getattr(owner, own_name)
    shape, style = tuple(param.shape), rule.style
    if style == "replicate" or (style in ("rowwise", "packed_rowwise") and len(shape) == 1):
        return
    if style == "segmented_colwise":
        segments = read_segments(rule.segments, (owner, *above), shape[0], tensor, name)
        cut_segments(owner, own_name, segments, 0, tensor)
        return
    if style not in _STYLES:
        raise UserError(f"the tensor-parallel style {style} of {name} is not one for a parameter: mend the plan")
    parts = _parts(owner, own_name, rule)
    dim = rule.dim
    if dim is None:
        dim = max(len(shape) - 2, 0) if style.endswith("colwise") else len(shape) - 1
    require_width(shape[dim] // parts, tensor.size, name)
    setattr(owner, own_name, cut_parameter(param, share_of(shape, dim, tensor.rank, tensor.size, parts=parts)))


def divide_parameter(owner: nn.Module, name: str, size: int) -> None:
    """Let the forward of `owner` see a `size`-th of its whole parameter `name`, which it adds to a partial sum on every
    rank. The parameter itself keeps name and value."""
    kind = type(owner)
    part = property(lambda self: self._parameters[name] / size)
    owner.__class__ = type(kind.__name__, (kind,), {name: part, "__module__": kind.__module__})


def _parts(owner: nn.Module, own_name: str, rule: Rule) -> int:
    """How many parts the parameter holds side by side. Experts tell whether gate and up projection do (transformers'
    `use_experts_implementation`), whatever the plan calls them."""
    if own_name.startswith("gate_up") and hasattr(owner, "is_concatenated"):
        return 2 if getattr(owner, "has_gate", True) and owner.is_concatenated else 1
    return parts_of(rule, owner) if rule.style.startswith("packed") else 1


def parts_of(rule: Rule, owner: nn.Module) -> int:
    """Return how many equal parts a packed weight of `owner` holds."""
    return getattr(owner, rule.parts) if isinstance(rule.parts, str) else rule.parts


def cut_head_parameters(owner: nn.Module, heads: Heads | None, tensor: TensorParallel) -> None:
    """Keep the rows of this rank's heads of every (heads, head_dim) matrix inside of `owner`, where that is an
    attention whose projections were split. A vector with an entry a head looks like too many others: a plan has to name
    it."""
    head_dim = getattr(owner, "head_dim", None)
    if heads is None or not any(shard_of(p) for child in owner.children() for p in child.parameters(recurse=False)):
        return
    shapes = {(count, head_dim) for count in (heads.query, heads.key_value) if count != head_dim}
    for name, param in list(owner.named_parameters()):
        module_name, _, own_name = name.rpartition(".")
        module = owner.get_submodule(module_name)
        if shard_of(param) is None and tuple(param.shape) in shapes and not isinstance(module, nn.Linear):
            _cut_by_head(module, own_name, tensor)


def _cut_by_head(module: nn.Module, name: str, tensor: TensorParallel) -> None:
    param = getattr(module, name)
    copies = max(tensor.size // param.shape[0], 1)
    setattr(
        module,
        name,
        cut_parameter(param, share_of(tuple(param.shape), 0, tensor.rank, tensor.size, copies=copies)),
    )
    if copies > 1:
        sum_gradients(module, [name], sum_of_copies(tensor, copies))
