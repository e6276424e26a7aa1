"""What each style of a tensor-parallel plan makes of a module: one function a style.

The words are transformers' (`transformers.distributed.tensor_parallel`), so that the plans which models
declare are read as they are. A function takes the `PlanTarget` and returns what stands there from now on: a new
module, or the same one with hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from harness.errors import UserError
from harness.parallel.comm import copy_to_group, gather_from_group, split_to_group
from harness.parallel.generators import own_generators
from harness.parallel.plans.hook_styles import (
    all_reduce,
    copy_input,
    gather_input,
    local_params,
    mla_kv_a_proj,
    moe_identity_expert,
    moe_tp_experts,
    replicate,
    replicated_with_grad_allreduce,
)
from harness.parallel.plans.parameter_styles import parts_of
from harness.parallel.plans.target import PlanTarget, style_error
from harness.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedColumnLinear,
    VocabParallelEmbedding,
)
from harness.parallel.tensor.segments import join_shared, read_segments, shard_of_segments
from harness.parallel.tensor.shard import cut_parameter, share_of
from harness.parallel.tensor.summed_gradients import sum_gradients_of_copies


def colwise(target: PlanTarget, parts: int = 1) -> nn.Module:
    """Split a linear layer over its outputs, which stay local; in attention by whole heads."""
    transposed, tensor = _is_transposed(target), target.tensor
    shard = target.share(tuple(target.module.get_parameter("weight").shape), int(transposed), parts=parts)
    layer = ColumnParallelLinear.from_linear(target.module, tensor.group, shard=shard, weight_transposed=transposed)
    if shard.copied:
        _repeat_less(target)
        sum_gradients_of_copies(layer, ["weight", "bias"], tensor.group)
    elif _shares_key_values(target):  # also where the keys are those of an earlier layer, which this one does not cut
        _repeat_less(target)
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
    """As colwise, for a weight that holds parts of unequal width (`harness.parallel.tensor.segments`): a share of
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
    """See `harness.parallel.plans.parameter_styles`: a style for parameters alone."""
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


def _shares_key_values(target: PlanTarget) -> bool:
    """Whether this rank has a part of a key/value head's query heads, and the attention counts them."""
    if target.attention is None or target.heads is None or not target.attention.inside:
        return False
    return target.heads.key_value < target.tensor.size and hasattr(target.attention.module, "num_key_value_groups")


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
