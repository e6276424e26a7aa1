"""What each style of a tensor-parallel plan makes of a module: one function a style.

The words are transformers' (`transformers.distributed.tensor_parallel`), so that the plans which models declare are
read as they are. A function takes the `PlanTarget` and returns what stands there from now on: a new module, or the same
one with hooks.

Some styles leave a module whole, and cut or join with hooks what goes in and what comes out. Parameters that a plan
names itself (fused experts, attention sinks) are cut without a new layer in their place. So are the norms of single
heads, which are not in the plans: a weight (heads, head_dim) is found by its shape and cut like the heads of a rank.
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
from harness.parallel.plans.plan import PlanRule
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


def replicated_with_grad_allreduce(target: PlanTarget) -> nn.Module:
    """Sum the gradients of a module that every rank holds whole and applies to its own heads."""
    for module in target.module.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            sum_gradients(module, names, GradientSum(target.tensor.group))
    return target.module


def moe_tp_experts(target: PlanTarget) -> nn.Module:
    """Experts of which each rank holds a part of every one: what goes in is whole, what comes out is
    summed."""
    group = target.tensor.group

    def before_forward(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return tuple(_copied(x, group) for x in args), {name: _copied(x, group) for name, x in kwargs.items()}

    target.module.register_forward_pre_hook(before_forward, with_kwargs=True)
    return all_reduce(target)


def moe_identity_expert(target: PlanTarget) -> nn.Module:
    """Divide the output of an expert that returns its input, alike on every rank, where experts' outputs are summed."""
    target.module.register_forward_hook(lambda _module, _args, output: output / target.tensor.size)
    return target.module


def gather_input(target: PlanTarget) -> nn.Module:
    """Gather the inputs and split the output of a module that needs the whole width (a norm over all heads)."""
    group, widths = target.tensor.group, target.widths(target.module.get_parameter("weight").shape[-1])
    target.module.register_forward_pre_hook(
        lambda _module, args: tuple(gather_from_group(x, group, widths) for x in args)
    )
    target.module.register_forward_hook(lambda _module, _args, output: split_to_group(output, group, widths))
    return target.module


def copy_input(target: PlanTarget) -> nn.Module:
    """Sum the input's gradients for an owner of split parameters, of which each rank makes its part of the output."""
    group = target.tensor.group
    target.module.register_forward_pre_hook(lambda _module, args: tuple(_copied(x, group) for x in args))
    return target.module


def mla_kv_a_proj(target: PlanTarget) -> nn.Module:
    """Return a whole projection whose output is two: one that a split layer takes in, and `qk_rope_head_dim` rotary
    values that go to each rank's own heads, so that their gradients are summed (DeepSeek-V2, arXiv
    2405.04434, section 2.1).
    """
    tail, group = target.config.qk_rope_head_dim, target.tensor.group
    target.module.register_forward_hook(lambda _module, _args, output: copy_tail_to_group(output, tail, group))
    return target.module


def all_reduce(target: PlanTarget) -> nn.Module:
    """Sum the output of a module, which is partial on each rank."""
    group = target.tensor.group
    target.module.register_forward_hook(lambda _module, _args, output: reduce_from_group(output, group))
    return target.module


def local_params(target: PlanTarget) -> nn.Module:
    """Leave a module as it is whose parameters are split by rules of their own: its forward uses this rank's parts."""
    return target.module


def replicate(target: PlanTarget) -> nn.Module:
    """Leave a module as it is that every rank holds whole and applies to the same input."""
    return target.module


def _copied(x: object, group: dist.ProcessGroup | None) -> object:
    return copy_to_group(x, group) if isinstance(x, Tensor) and x.requires_grad else x


def colwise(target: PlanTarget, parts: int = 1) -> nn.Module:
    """Split a linear layer over its outputs, which stay local; in attention by whole heads."""
    transposed, tensor = _is_transposed(target), target.tensor
    shard = target.share(tuple(target.module.get_parameter("weight").shape), int(transposed), parts=parts)
    layer = ColumnParallelLinear.from_linear(target.module, tensor.group, shard=shard, weight_transposed=transposed)
    if shard.copied:
        _repeat_less(target)
        sum_gradients_of_copies(layer, ["weight", "bias"], tensor.group)
    return layer


def packed_colwise(target: PlanTarget) -> nn.Module:
    """As colwise, for a weight that holds several parts side by side: a share of each (gate|up,
    query|key|value)."""
    return colwise(target, parts_of(target.rule, target.owner))


def shared_colwise(target: PlanTarget) -> nn.Module:
    """Have every rank hold a linear layer whole, and compute its share of the outputs and all of the last `whole`
    units.

    Those are the one key and the one value head of multi-query attention. The gradients are summed.
    """
    transposed, tensor = _is_transposed(target), target.tensor
    outputs = target.module.get_parameter("weight").shape[int(transposed)]
    split = outputs - target.rule.whole * target.unit
    own = target.deal(split)[tensor.rank] if split else (0, 0)
    layer = SharedColumnLinear.from_linear(
        target.module, tensor.group, pieces=[own, (split, outputs)], weight_transposed=transposed
    )
    return replicated_with_grad_allreduce(replace(target, module=layer))


def colwise_gather_output(target: PlanTarget) -> nn.Module:
    """Split a linear layer over its outputs, and gather them unless the target keeps them local.

    A head does, for vocabulary-parallel logits.
    """
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
    """As rowwise, for outputs that all go to split values with no layer between: their gradients are summed."""
    layer, group = rowwise(target), target.tensor.group
    layer.register_forward_hook(lambda _module, _args, output: copy_to_group(output, group))
    return layer


def rowwise_split_output(target: PlanTarget) -> nn.Module:
    """As rowwise, for outputs of which each rank's heads then take their own: a rank keeps its share."""
    widths = target.widths(target.module.get_parameter("weight").shape[1 if _is_transposed(target) else 0])
    layer, group = rowwise(target), target.tensor.group
    layer.register_forward_hook(lambda _module, _args, output: split_to_group(output, group, widths))
    return layer


def packed_rowwise(target: PlanTarget) -> nn.Module:
    """As rowwise, for inputs that are several parts side by side, each of which was split."""
    return _row(target, input_is_parallel=True, parts=parts_of(target.rule, target.owner))


def embedding_rowwise(target: PlanTarget) -> nn.Module:
    """Split an embedding by vocabulary."""
    module = _plain_embedding(target)
    shard = _whole_widths(target).share(tuple(module.weight.shape), 0)
    return VocabParallelEmbedding.from_embedding(module, target.tensor.group, shard=shard)


def embedding_colwise(target: PlanTarget) -> nn.Module:
    """Split an embedding over the width of its vectors, and gather them."""
    module, group = _plain_embedding(target), target.tensor.group
    shard = _whole_widths(target).share(tuple(module.weight.shape), 1)
    module.weight = cut_parameter(module.get_parameter("weight"), shard)
    module.register_forward_hook(lambda _module, _args, output: gather_from_group(output, group, shard.widths))
    return module


def segmented_colwise(target: PlanTarget) -> nn.Module:
    """As colwise, for a weight that holds parts of unequal width (`harness.parallel.tensor.shard`): a share of
    each. Where ranks are to use the same unit of a part, all get it from those that hold it."""
    transposed, tensor = _is_transposed(target), target.tensor
    shape, dim = tuple(target.module.get_parameter("weight").shape), int(transposed)
    segments = read_segments(target.rule.segments, [target.owner], shape[dim], tensor, target.name)
    shard = shard_of_segments(segments, shape, dim, tensor)
    layer = ColumnParallelLinear.from_linear(target.module, tensor.group, shard=shard, weight_transposed=transposed)
    if any(segment.is_shared(tensor.size) for segment in segments):
        layer.register_forward_hook(lambda _module, _args, output: join_shared(output, segments, tensor))
        if hasattr(target.owner, "num_key_value_groups"):
            _repeat_less(target)
    return layer


def grouped_norm(target: PlanTarget) -> nn.Module:
    """Split a norm over groups of `unit` channels that stands between split layers.

    Each rank norms its own groups, or, where ranks share a group, all channels.
    """
    module, tensor = target.module, target.tensor
    weight = module.get_parameter("weight")
    shape = tuple(weight.shape)
    if shape[0] // getattr(module, target.rule.unit or "") % tensor.size:
        return gather_input(replace(target, rule=replace(target.rule, unit=None)))
    module.weight = cut_parameter(weight, share_of(shape, 0, tensor.rank, tensor.size))
    return module


def divided(target: PlanTarget) -> nn.Module:
    """See `harness.parallel.plans.styles`: a style for parameters alone."""
    raise style_error(target, "a parameter")


STYLE_FUNCTIONS: dict[str, Callable[[PlanTarget], nn.Module]] = {
    function.__name__: function
    for function in (
        colwise,
        packed_colwise,
        colwise_gather_output,
        rowwise,
        rowwise_split_input,
        rowwise_to_split,
        rowwise_split_output,
        packed_rowwise,
        embedding_rowwise,
        embedding_colwise,
        moe_tp_experts,
        moe_identity_expert,
        mla_kv_a_proj,
        all_reduce,
        local_params,
        replicated_with_grad_allreduce,
        replicate,
        shared_colwise,
        gather_input,
        copy_input,
        divided,
        segmented_colwise,
        grouped_norm,
    )
}


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
    """Return the target of a layer between which and its neighbours values are whole: its share need not be whole
    heads."""
    return replace(target, attention=None)


def _is_transposed(target: PlanTarget) -> bool:
    """Whether the linear layer at `target` stores its weight as (in, out). Raises UserError where there is
    none."""
    if isinstance(target.module, Conv1D):
        return True
    if isinstance(target.module, nn.Linear) and _computes_as_linear(type(target.module)):
        return False
    raise style_error(target, "nn.Linear or Conv1D")


def _computes_as_linear(kind: type[nn.Linear]) -> bool:
    """Whether the forward of a subclass of nn.Linear is nothing else, as a small one shows."""
    if kind.forward is nn.Linear.forward:
        return True
    with own_generators(0), torch.no_grad():
        try:
            layer, x = kind(3, 2, device="cpu"), torch.randn(4, 3, device="cpu")
            return torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))
        except (TypeError, RuntimeError, AttributeError):
            return False


def _plain_embedding(target: PlanTarget) -> nn.Embedding:
    """Return the embedding at `target`; UserError where it is none, or one that does more than look up."""
    module = target.module
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
        raise style_error(target, "a plain nn.Embedding")
    return module


def _repeat_less(target: PlanTarget) -> None:
    """Tell an attention module that each of its key/value heads now serves fewer query heads on this rank."""
    attention, heads, size = target.attention, target.heads, target.tensor.size
    if attention is None or heads is None or not hasattr(attention.module, "num_key_value_groups"):
        raise UserError(
            f"{target.name} has fewer key/value heads than tensor_parallel.autotp_size {size}, "
            f"and its {type(target.owner).__name__} cannot share them: use at most {heads.key_value if heads else 1}"
        )
    start, stop = heads.queries(size)[target.tensor.rank]
    attention.module.num_key_value_groups = stop - start
