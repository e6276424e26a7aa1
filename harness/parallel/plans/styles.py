"""The styles of a tensor-parallel plan: one function for each.

The names are transformers' (`transformers.distributed.tensor_parallel`), so declared plans work unchanged. A function
takes the `PlanTarget` and returns the module to put there: a new one, or the same one with hooks.

Some styles leave a module whole, and split or join its inputs and outputs with hooks. Parameters that a plan names
directly (fused experts, attention sinks) are sharded in place, without a new layer. So are per-head norms, which plans
do not name: a weight [heads, head_dim] is recognised by its shape and split like the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from harness.errors import UserError
from harness.parallel.comm import (
    TensorParallel,
    copy_tail_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from harness.parallel.generators import own_generators
from harness.parallel.plans.heads import Attention
from harness.parallel.plans.plan import STYLES, PlanRule
from harness.parallel.plans.target import PlanTarget, style_error
from harness.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedColumnLinear,
    VocabParallelEmbedding,
)
from harness.parallel.tensor.partial_gradients import GradientSum, sum_gradients, sum_gradients_of_copies
from harness.parallel.tensor.shard import (
    cut_parameter,
    cut_segments,
    join_shared,
    read_segments,
    shard_of,
    shard_of_segments,
    share_of,
)

_STYLES = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")
_ALIGNED = 8  # grouped matrix products want rows of whole 16 bytes: 8 entries in half precision


def cut_bare_parameter(target: PlanTarget, own_name: str, above: Sequence[nn.Module] = ()) -> None:
    """Shard the parameter `own_name` of the target's owner, which the plan names directly.

    `rule.dim` is the dimension to split; by default, outputs are the last dimension but one (or the only one), and
    inputs the last. Shards of fused experts are padded with zeros to a width that grouped matrix products accept.
    Raises UserError for a style that does not apply to parameters.

    Args:
        above: the modules around the owner, innermost first.
    """
    owner = target.owner
    rule = target.rule
    name = target.name
    if rule.style == "divided":
        divide_parameter(owner, own_name, target.tensor.size)
        return
    param = getattr(owner, own_name)
    shape = tuple(param.shape)
    style = rule.style
    # The bias of a row-parallel product is added once, after the all-reduce, so it stays whole.
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
    """Make the forward of `owner` read its whole parameter `name` divided by `size`."""
    # The forward adds the parameter to a partial sum on every rank, so that the all-reduce contains it once. A property
    # hides the entry in `_parameters`: nn.Module looks there, by __getattr__, only for names that the class lacks. The
    # module gets a class of its own, so that other modules of this kind are not changed.
    kind = type(owner)
    part = property(lambda self: self._parameters[name] / size)
    owner.__class__ = type(kind.__name__, (kind,), {name: part, "__module__": kind.__module__})


def _parts(owner: nn.Module, own_name: str, rule: PlanRule) -> tuple[int, int]:
    """Return the number of parts side by side in a parameter, and of consecutive entries that must stay together."""
    # Experts declare whether gate and up projection are side by side or alternate (transformers'
    # `use_experts_implementation`), whatever the style in the plan.
    if own_name.startswith("gate_up") and hasattr(owner, "is_concatenated"):
        if not getattr(owner, "has_gate", True):
            return 1, 1
        return (2, 1) if owner.is_concatenated else (1, 2)
    return parts_of(rule, owner) if rule.style.startswith("packed") else 1, 1


def parts_of(rule: PlanRule, owner: nn.Module) -> int:
    """Return the number of equal parts in a packed weight of `owner`."""
    return getattr(owner, rule.parts) if isinstance(rule.parts, str) else rule.parts


def cut_head_parameters(owner: nn.Module, attention: Attention | None, tensor: TensorParallel) -> None:
    """Split every [heads, head_dim] matrix inside `owner` by heads, if `owner` is a sharded attention."""
    # A vector with one entry per head cannot be told from other vectors by its shape: a plan must name it.
    head_dim = getattr(owner, "head_dim", None)
    if attention is None or not any(shard_of(p) for child in owner.children() for p in child.parameters(recurse=False)):
        return
    heads = attention.heads
    # If head_dim equals the number of heads, a square matrix could also be a projection.
    shapes = {(count, head_dim) for count in (heads.query, heads.key_value) if count != head_dim}
    for name, param in list(owner.named_parameters()):
        module_name, _, own_name = name.rpartition(".")
        module = owner.get_submodule(module_name)
        if shard_of(param) is None and tuple(param.shape) in shapes and not isinstance(module, nn.Linear):
            ranges = heads.queries if param.shape[0] == heads.query else heads.key_values
            shard = share_of(tuple(param.shape), 0, tensor.rank, ranges=ranges(tensor.size))
            setattr(module, own_name, cut_parameter(param, shard))
            if shard.copied:
                sum_gradients_of_copies(module, [own_name], tensor.group)


def replicated_with_grad_allreduce(target: PlanTarget) -> nn.Module:
    """Replicate a module and all-reduce its gradients, because each rank applies it to its own heads."""
    for module in target.module.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            sum_gradients(module, names, GradientSum(target.tensor.group))
    return target.module


def moe_tp_experts(target: PlanTarget) -> nn.Module:
    """Shard every expert over the ranks: inputs are whole, outputs are all-reduced."""
    group = target.tensor.group

    def before_forward(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return tuple(_copied(x, group) for x in args), {name: _copied(x, group) for name, x in kwargs.items()}

    target.module.register_forward_pre_hook(before_forward, with_kwargs=True)
    return all_reduce(target)


def moe_identity_expert(target: PlanTarget) -> nn.Module:
    """Divide the output of an identity expert by the number of ranks, because outputs are summed."""
    target.module.register_forward_hook(lambda _module, _args, output: output / target.tensor.size)
    return target.module


def gather_input(target: PlanTarget) -> nn.Module:
    """Gather the inputs and split the output of a module that needs the whole width (a norm over all heads)."""
    group = target.tensor.group
    widths = target.widths(target.module.get_parameter("weight").shape[-1])
    target.module.register_forward_pre_hook(
        lambda _module, args: tuple(gather_from_group(x, group, widths) for x in args)
    )
    target.module.register_forward_hook(lambda _module, _args, output: split_to_group(output, group, widths))
    return target.module


def copy_input(target: PlanTarget) -> nn.Module:
    """All-reduce the gradient of the input, for a module whose sharded parameters compute a part of the output."""
    group = target.tensor.group
    target.module.register_forward_pre_hook(lambda _module, args: tuple(_copied(x, group) for x in args))
    return target.module


def mla_kv_a_proj(target: PlanTarget) -> nn.Module:
    """Replicate a projection, and all-reduce the gradients of its last `qk_rope_head_dim` outputs."""
    # Those rotary values go to each rank's own heads; the other outputs go to a split layer, which sums their gradients
    # itself (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    tail = target.config.qk_rope_head_dim
    group = target.tensor.group
    target.module.register_forward_hook(lambda _module, _args, output: copy_tail_to_group(output, tail, group))
    return target.module


def all_reduce(target: PlanTarget) -> nn.Module:
    """All-reduce the output of a module, because each rank computes a partial sum."""
    group = target.tensor.group
    target.module.register_forward_hook(lambda _module, _args, output: reduce_from_group(output, group))
    return target.module


def local_params(target: PlanTarget) -> nn.Module:
    """Leave the module unchanged: its parameters have their own rules, and its forward uses the shards."""
    return target.module


def replicate(target: PlanTarget) -> nn.Module:
    """Leave the module unchanged: every rank applies the whole module to the same input."""
    return target.module


def _copied(x: object, group: dist.ProcessGroup | None) -> object:
    # A copy acts only in the backward: it sums the gradient, if there is one.
    return copy_to_group(x, group) if isinstance(x, Tensor) and x.requires_grad else x


def colwise(target: PlanTarget, parts: int = 1) -> nn.Module:
    """Split a linear layer over its outputs, in attention by whole heads; outputs stay on the rank."""
    transposed = _is_transposed(target)
    tensor = target.tensor
    shard = target.share(tuple(target.module.get_parameter("weight").shape), int(transposed), parts=parts)
    layer = ColumnParallelLinear.from_linear(target.module, tensor.group, shard=shard, weight_transposed=transposed)
    # Several ranks hold the same key/value head, each with fewer of its query heads.
    if shard.copied:
        _repeat_less(target)
        sum_gradients_of_copies(layer, ["weight", "bias"], tensor.group)
    return layer


def packed_colwise(target: PlanTarget) -> nn.Module:
    """Split as colwise, but take a share of each of several parts side by side (gate|up, query|key|value)."""
    return colwise(target, parts_of(target.rule, target.owner))


def shared_colwise(target: PlanTarget) -> nn.Module:
    """Replicate a linear layer, but compute only this rank's share of the outputs and the last `whole` units.

    Those units are the single key and value head of multi-query attention. Gradients are all-reduced.
    """
    transposed = _is_transposed(target)
    tensor = target.tensor
    outputs = target.module.get_parameter("weight").shape[int(transposed)]
    split = outputs - target.rule.whole * target.unit
    own = target.deal(split)[tensor.rank] if split else (0, 0)
    layer = SharedColumnLinear.from_linear(
        target.module, tensor.group, pieces=[own, (split, outputs)], weight_transposed=transposed
    )
    return replicated_with_grad_allreduce(replace(target, module=layer))


def colwise_gather_output(target: PlanTarget) -> nn.Module:
    """Split a linear layer over its outputs, and gather them unless `target.local_output`, as for split logits."""
    transposed = _is_transposed(target)
    return ColumnParallelLinear.from_linear(
        target.module,
        target.tensor.group,
        shard=_whole_widths(target).share(tuple(target.module.get_parameter("weight").shape), int(transposed)),
        gather_output=not target.local_output,
        weight_transposed=transposed,
    )


def rowwise(target: PlanTarget) -> nn.Module:
    """Split a linear layer over its inputs, which arrive split; the outputs are summed."""
    return _row(target, input_is_parallel=True)


def rowwise_split_input(target: PlanTarget) -> nn.Module:
    """Split a linear layer over its inputs, which arrive whole; the outputs are summed."""
    return _row(_whole_widths(target), input_is_parallel=False)


def rowwise_to_split(target: PlanTarget) -> nn.Module:
    """Split as rowwise, and all-reduce the output's gradient, for outputs that each rank uses with split values."""
    layer = rowwise(target)
    group = target.tensor.group
    layer.register_forward_hook(lambda _module, _args, output: copy_to_group(output, group))
    return layer


def rowwise_split_output(target: PlanTarget) -> nn.Module:
    """Split as rowwise, but keep only the outputs of this rank's own heads."""
    widths = target.widths(target.module.get_parameter("weight").shape[1 if _is_transposed(target) else 0])
    layer = rowwise(target)
    group = target.tensor.group
    layer.register_forward_hook(lambda _module, _args, output: split_to_group(output, group, widths))
    return layer


def packed_rowwise(target: PlanTarget) -> nn.Module:
    """Split as rowwise, for an input of several parts side by side, each of them split."""
    return _row(target, input_is_parallel=True, parts=parts_of(target.rule, target.owner))


def embedding_rowwise(target: PlanTarget) -> nn.Module:
    """Split an embedding by vocabulary."""
    module = _plain_embedding(target)
    shard = _whole_widths(target).share(tuple(module.weight.shape), 0)
    return VocabParallelEmbedding.from_embedding(module, target.tensor.group, shard=shard)


def embedding_colwise(target: PlanTarget) -> nn.Module:
    """Split an embedding over the width of its vectors, and gather them."""
    module = _plain_embedding(target)
    group = target.tensor.group
    shard = _whole_widths(target).share(tuple(module.weight.shape), 1)
    module.weight = cut_parameter(module.get_parameter("weight"), shard)
    module.register_forward_hook(lambda _module, _args, output: gather_from_group(output, group, shard.widths))
    return module


def segmented_colwise(target: PlanTarget) -> nn.Module:
    """Split as colwise, but take a share of each of several parts of unequal width (`harness.parallel.tensor.shard`).

    Ranks that use the same unit of a part gather it from the ranks that hold it.
    """
    transposed = _is_transposed(target)
    tensor = target.tensor
    shape = tuple(target.module.get_parameter("weight").shape)
    dim = int(transposed)
    segments = read_segments(target.rule.segments, [target.owner], shape[dim], tensor, target.name)
    shard = shard_of_segments(segments, shape, dim, tensor)
    layer = ColumnParallelLinear.from_linear(target.module, tensor.group, shard=shard, weight_transposed=transposed)
    if any(segment.is_shared(tensor.size) for segment in segments):
        layer.register_forward_hook(lambda _module, _args, output: join_shared(output, segments, tensor))
        if hasattr(target.owner, "num_key_value_groups"):
            _repeat_less(target)
    return layer


def grouped_norm(target: PlanTarget) -> nn.Module:
    """Split a norm over groups of `unit` channels that lies between two split layers.

    Each rank normalises its own groups, or all channels if ranks share a group.
    """
    module = target.module
    tensor = target.tensor
    weight = module.get_parameter("weight")
    shape = tuple(weight.shape)
    if shape[0] // getattr(module, target.rule.unit or "") % tensor.size:
        return gather_input(replace(target, rule=replace(target.rule, unit=None)))
    module.weight = cut_parameter(weight, share_of(shape, 0, tensor.rank, tensor.size))
    return module


def divided(target: PlanTarget) -> nn.Module:
    """Raise UserError: this style is for parameters only, see `divide_parameter`."""
    raise style_error(target, "a parameter")


# By name, so that a style without a function fails at import.
STYLE_FUNCTIONS: dict[str, Callable[[PlanTarget], nn.Module]] = {style: globals()[style] for style in STYLES}
"""Style -> the function above with that name."""


def _row(target: PlanTarget, *, input_is_parallel: bool, parts: int = 1) -> nn.Module:
    transposed = _is_transposed(target)
    return RowParallelLinear.from_linear(
        target.module,
        target.tensor.group,
        shard=target.share(tuple(target.module.get_parameter("weight").shape), 0 if transposed else 1, parts=parts),
        input_is_parallel=input_is_parallel,
        weight_transposed=transposed,
    )


def _whole_widths(target: PlanTarget) -> PlanTarget:
    # Values around the layer are whole, so its shards need not be heads.
    return replace(target, attention=None)


def _is_transposed(target: PlanTarget) -> bool:
    """Return whether the linear layer at `target` stores its weight as [in, out]. UserError for other modules."""
    if isinstance(target.module, Conv1D):
        return True
    if isinstance(target.module, nn.Linear) and _computes_as_linear(type(target.module)):
        return False
    raise style_error(target, "nn.Linear or Conv1D")


def _computes_as_linear(kind: type[nn.Linear]) -> bool:
    """Return whether a subclass of nn.Linear computes what nn.Linear does, by trying a small instance."""
    if kind.forward is nn.Linear.forward:
        return True
    # The trial must not move the generators of the run.
    with own_generators(0), torch.no_grad():
        try:
            # Models are cut on meta, where nothing can be compared.
            layer = kind(3, 2, device="cpu")
            x = torch.randn(4, 3, device="cpu")
            return torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))
        # Of a subclass with other arguments, other shapes or no such weight.
        except (TypeError, RuntimeError, AttributeError):
            return False


def _plain_embedding(target: PlanTarget) -> nn.Embedding:
    """Return the embedding at `target`. Raises UserError unless it is an nn.Embedding that only looks up rows."""
    module = target.module
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
        raise style_error(target, "a plain nn.Embedding")
    return module


def _repeat_less(target: PlanTarget) -> None:
    """Set `num_key_value_groups` of the attention to the query heads that each key/value head serves on this rank."""
    attention = target.attention
    heads = target.heads
    size = target.tensor.size
    if attention is None or heads is None or not hasattr(attention.module, "num_key_value_groups"):
        raise UserError(
            f"{target.name} has fewer key/value heads than tensor_parallel.autotp_size {size}, "
            f"and its {type(target.owner).__name__} cannot share them: use at most {heads.key_value if heads else 1}"
        )
    start, stop = heads.queries(size)[target.tensor.rank]
    attention.module.num_key_value_groups = stop - start
