"""Parameters that are cut without a layer of their own in their place: those that a plan names itself (fused experts,
attention sinks), and the norms of single heads.

A norm with a weight for each head, (heads, head_dim), is not in the plans. It is found by its shape: it is used with
the heads of a rank, so it is cut like them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.heads import Attention
from harness.parallel.plans.plan import PlanRule
from harness.parallel.plans.target import PlanTarget
from harness.parallel.tensor.segments import cut_segments, read_segments
from harness.parallel.tensor.shard import cut_parameter, shard_of, share_of
from harness.parallel.tensor.summed_gradients import sum_gradients_of_copies

_STYLES = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")
_ALIGNED = 8  # grouped matrix products want rows of whole 16 bytes: 8 entries in half precision


def cut_bare_parameter(target: PlanTarget, own_name: str, above: Sequence[nn.Module] = ()) -> None:
    """Keep this rank's part of the parameter `own_name` of the target's owner, which the plan itself names.

    Its outputs are the last dimension but one, or the only one; its inputs the last; or `rule.dim` says which. Shares
    of fused experts are padded with zeros to what grouped matrix products take. `above`: the modules around the owner,
    the nearest first. Raises UserError for a style that is not a parameter's.
    """
    owner, rule, name = target.owner, target.rule, target.name
    if rule.style == "divided":
        divide_parameter(owner, own_name, target.tensor.size)
        return
    param = getattr(owner, own_name)
    shape, style = tuple(param.shape), rule.style
    if style == "replicate" or (style in ("rowwise", "packed_rowwise") and len(shape) == 1):
        return
    if style == "segmented_colwise":
        segments = read_segments(rule.segments, (owner, *above), shape[0], target.tensor, name)
        cut_segments(owner, own_name, segments, 0, target.tensor)
        return
    if style not in _STYLES:
        raise UserError(f"the tensor-parallel style {style} of {name} does not apply to a parameter: correct the plan")
    parts, unit = _parts(owner, own_name, rule)
    dim = rule.dim
    if dim is None:
        dim = max(len(shape) - 2, 0) if style.endswith("colwise") else len(shape) - 1
    multiple = _ALIGNED * unit if hasattr(owner, "is_concatenated") else 1
    shard = target.share(shape, dim, parts=parts, unit=unit, multiple=multiple)
    setattr(owner, own_name, cut_parameter(param, shard))
    if shard.copied:
        sum_gradients_of_copies(owner, [own_name], target.tensor.group)


def divide_parameter(owner: nn.Module, name: str, size: int) -> None:
    """Let the forward of `owner` see a `size`-th of its whole parameter `name`, which it adds to a partial sum on every
    rank. The parameter itself keeps name and value."""
    kind = type(owner)
    part = property(lambda self: self._parameters[name] / size)
    owner.__class__ = type(kind.__name__, (kind,), {name: part, "__module__": kind.__module__})


def _parts(owner: nn.Module, own_name: str, rule: PlanRule) -> tuple[int, int]:
    """Return how many parts the parameter holds side by side, and how many neighbours stay together.

    Experts declare whether gate and up projection lie side by side or alternate (transformers'
    `use_experts_implementation`), whatever the plan calls them.
    """
    if own_name.startswith("gate_up") and hasattr(owner, "is_concatenated"):
        if not getattr(owner, "has_gate", True):
            return 1, 1
        return (2, 1) if owner.is_concatenated else (1, 2)
    return parts_of(rule, owner) if rule.style.startswith("packed") else 1, 1


def parts_of(rule: PlanRule, owner: nn.Module) -> int:
    """Return how many equal parts a packed weight of `owner` holds."""
    return getattr(owner, rule.parts) if isinstance(rule.parts, str) else rule.parts


def cut_head_parameters(owner: nn.Module, attention: Attention | None, tensor: TensorParallel) -> None:
    """Keep the rows of this rank's heads of every (heads, head_dim) matrix inside of `owner`, where that is an
    attention whose projections were split. A vector with an entry a head looks like too many others: a plan has to name
    it."""
    head_dim = getattr(owner, "head_dim", None)
    if attention is None or not any(shard_of(p) for child in owner.children() for p in child.parameters(recurse=False)):
        return
    heads = attention.heads
    shapes = {(count, head_dim) for count in (heads.query, heads.key_value) if count != head_dim}
    for name, param in list(owner.named_parameters()):
        module_name, _, own_name = name.rpartition(".")
        module = owner.get_submodule(module_name)
        if shard_of(param) is None and tuple(param.shape) in shapes and not isinstance(module, nn.Linear):
            stretches = heads.queries if param.shape[0] == heads.query else heads.key_values
            shard = share_of(tuple(param.shape), 0, tensor.rank, stretches=stretches(tensor.size))
            setattr(module, own_name, cut_parameter(param, shard))
            if shard.copied:
                sum_gradients_of_copies(module, [own_name], tensor.group)
