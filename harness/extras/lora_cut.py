"""Cut low-rank adapters in the same way as the layers that they adapt.

After Hu et al. 2021 (arXiv 2106.09685): y = W x + s B A x with W [out, in], A [r, in], B [out, r]. If W is split over
its outputs, so is B, and A is whole. If W is split over its inputs, so is A, whose r outputs are summed over the group,
and B is whole. The magnitudes of DoRA are split as the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from transformers import PretrainedConfig

from harness.errors import UserError
from harness.hf.layers.wrappers import Wrapper, wrappers_in
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.plan import Plan
from harness.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedColumnLinear,
)
from harness.parallel.tensor.partial_gradients import GradientSum, sum_gradients, sum_gradients_of_copies
from harness.parallel.tensor.shard import Shard, cut_parameter, shard_of
from harness.parallel.token_exchange import NO_NEIGHBOURS, Neighbours


@contextmanager
def adapters_removed(module: nn.Module, kept: frozenset[str] = frozenset()) -> Iterator[None]:
    """Remove the adapters from the layers in `module` within this context, so that layers have their own names.

    Afterwards the adapters wrap whatever layer then has that name. `kept`: names of layers that keep their adapters.
    """
    wrappers = {name: around for name, around in wrappers_in(module).items() if name not in kept}
    for name, (*_, innermost) in wrappers.items():
        module.set_submodule(name, innermost.base_layer)
    try:
        yield
    finally:
        for name, (*_, innermost) in wrappers.items():
            innermost.base_layer = module.get_submodule(name)
            module.set_submodule(name, wrappers[name][0])


def cut_with_adapters(
    module: nn.Module,
    plan: Plan,
    tensor: TensorParallel,
    config: PretrainedConfig,
    *,
    local_logits: bool = False,
    neighbours: Neighbours = NO_NEIGHBOURS,
) -> None:
    """Cut a pipeline layer by `apply.cut`, then cut its adapters in the same way.

    Raises UserError as `cut` does, and if a layer was cut in a way that an adapter cannot follow.
    """
    wrappers = wrappers_in(module)
    hooked = frozenset(name for name, around in wrappers.items() if _acts_on_both(around[0], plan, name))
    with adapters_removed(module, kept=hooked):
        cut(module, "", plan, tensor, config, local_logits=local_logits, neighbours=neighbours)
    for name, around in wrappers.items():
        for wrapper in around if name not in hooked else ():
            follow = _follow_parameter if hasattr(wrapper, "parameter_name") else _follow_layer
            follow(wrapper, around[-1].base_layer, name, tensor)


def _acts_on_both(wrapper: nn.Module, plan: Plan, name: str) -> bool:
    """Return whether the plan's rule for a linear layer changes only its input or output, not its weight.

    Such a rule must be applied to the wrapper, which adds up the outputs of the layer and of its adapters.
    """
    rule = plan.rule_of(name)
    cuts = rule is not None and ("colwise" in rule.style or "rowwise" in rule.style)
    return not cuts and not hasattr(wrapper, "parameter_name")


def _follow_layer(wrapper: Wrapper, base: Wrapper, name: str, tensor: TensorParallel) -> None:
    """Cut the adapters of a linear layer."""
    _hand_on_hooks(base, wrapper)
    shard = shard_of(base.weight)
    if isinstance(base, SharedColumnLinear):
        for key, linear in list(wrapper.lora_B.items()):
            layer = SharedColumnLinear.from_linear(linear, base.group, pieces=base.pieces, weight_transposed=False)
            sum_gradients(layer, ["weight", "bias"], GradientSum(tensor.group))
            wrapper.lora_B[key] = layer
        for magnitude in wrapper.lora_magnitude_vector.values():
            sum_gradients(magnitude, ["weight"], GradientSum(tensor.group))
    elif shard is None:
        return  # whole on every rank, and so are its adapters
    elif isinstance(base, ColumnParallelLinear):
        for key, linear in list(wrapper.lora_B.items()):
            wrapper.lora_B[key] = _columns(linear, base, shard, tensor)
        for magnitude in wrapper.lora_magnitude_vector.values():
            magnitude.weight = cut_parameter(magnitude.weight, _same_pieces(shard, magnitude.weight, dim=0))
            if shard.copied:
                sum_gradients_of_copies(magnitude, ["weight"], tensor.group)
    elif isinstance(base, RowParallelLinear):
        for key, linear in list(wrapper.lora_A.items()):
            part = _same_pieces(shard, linear.weight, dim=1)
            wrapper.lora_A[key] = RowParallelLinear.from_linear(
                linear, base.group, shard=part, input_is_parallel=base.input_is_parallel
            )
    else:
        raise UserError(
            f"{name}: LoRA does not support a {type(base).__name__} under tensor parallelism: remove it "
            "from the target modules, or set tensor_parallel.autotp_size to 1"
        )


def _hand_on_hooks(base: nn.Module, wrapper: nn.Module) -> None:
    """Move a layer's forward hooks to its wrapper, so that they see the sum of its output and its adapters'."""
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(wrapper, name).update(getattr(base, name))
        getattr(base, name).clear()


def _follow_parameter(wrapper: Wrapper, base: Wrapper, _name: str, _tensor: TensorParallel) -> None:
    """Cut the adapters of a parameter: one matrix [out, in], or the matrices of all experts [experts, out, in], or
    [experts, in, out] if the module has `is_transposed`. Adapters that stay whole have partial gradients, which
    `partial_gradients.py` sums.
    """
    shard = shard_of(getattr(base, wrapper.parameter_name))
    if shard is None:
        return
    matrix = len(shard.full_shape) == 2
    outputs = 0
    if not matrix:
        outputs = 2 if getattr(base, "is_transposed", False) else 1
    for key, rank in wrapper.r.items():
        a = wrapper.lora_A[key]
        b = wrapper.lora_B[key]
        if shard.dim == outputs:
            b.weight = cut_parameter(b.weight, _same_pieces(shard, b.weight, dim=0))
        elif shard.dim > 0:
            a.weight = cut_parameter(a.weight, _same_pieces(shard, a.weight, dim=1))
        else:  # whole experts: A holds r consecutive rows for each expert, B interleaves their columns
            total = shard.full_shape[0]
            rows = tuple((start * rank, stop * rank) for start, stop in shard.pieces)
            columns = tuple((i * total + start, i * total + stop) for i in range(rank) for start, stop in shard.pieces)
            of_a = Shard(full_shape=tuple(a.weight.shape), dim=0, pieces=rows, padding=shard.padding * rank)
            of_b = Shard(full_shape=tuple(b.weight.shape), dim=1, pieces=columns, padding=shard.padding)
            a.weight = cut_parameter(a.weight, replace(of_a, over_data=shard.over_data))
            b.weight = cut_parameter(b.weight, replace(of_b, over_data=shard.over_data))
            wrapper.num_experts = shard.length


def _columns(
    linear: nn.Linear, base: ColumnParallelLinear, shard: Shard, tensor: TensorParallel
) -> ColumnParallelLinear:
    part = _same_pieces(shard, linear.weight, dim=0)
    layer = ColumnParallelLinear.from_linear(linear, base.group, shard=part, gather_output=base.gather_output)
    if shard.copied:  # neighbouring ranks hold the same key/value heads
        sum_gradients_of_copies(layer, ["weight", "bias"], tensor.group)
    return layer


def _same_pieces(shard: Shard, weight: Tensor, dim: int) -> Shard:
    """Return the shard of an adapter's weight: the pieces of its layer's `shard`, but along `dim`."""
    return replace(shard, full_shape=tuple(weight.shape), dim=dim)
