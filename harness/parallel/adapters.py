"""Low-rank adapters on layers that are cut: each adapter is cut as the layer that it stands on.

After Hu et al. 2021 (arXiv 2106.09685): y = W x + s B A x with W (out, in), A (r, in), B (out, r). Where W is split
over its outputs, so is B, and A is whole; where W is split over its inputs, so is A, whose r outputs are summed over
the group, and B is whole. Nothing here knows who made the adapters: a wrapper is a module that holds the layer itself
as `base_layer` and, beside it, `lora_A` and `lora_B` by the adapter's name (as peft's do).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from harness.config.errors import UserError
from harness.parallel.apply import cut
from harness.parallel.comm import TensorParallel
from harness.parallel.layers import ColumnParallelLinear, RowParallelLinear, sum_gradients, sum_of_copies
from harness.parallel.plan import Plan, Rule, wildcard
from harness.parallel.shard import Shard, shard_of


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` is a layer with adapters around it."""
    return "base_layer" in module._modules and "lora_A" in module._modules


def without_adapters(module: Any) -> Any:
    """The layer inside a wrapper, or the module itself."""
    return module.base_layer if is_wrapper(module) else module


def wrappers_in(module: nn.Module) -> dict[str, Any]:
    """Name -> wrapper of all layers with adapters in `module`."""
    return {name: child for name, child in module.named_modules() if is_wrapper(child)}


@contextmanager
def lifted(module: nn.Module, kept: frozenset[str] = frozenset()) -> Iterator[None]:
    """While it lasts, the layers in `module` stand without their adapters, under their own names; then the adapters
    are laid around what stands there. `kept`: names of wrappers that stay."""
    wrappers = {name: wrapper for name, wrapper in wrappers_in(module).items() if name not in kept}
    for name, wrapper in wrappers.items():
        module.set_submodule(name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            wrapper.base_layer = module.get_submodule(name)
            module.set_submodule(name, wrapper)


def cut_with_adapters(
    module: nn.Module, plan: Plan, tensor: TensorParallel, config: Any, *, local_logits: bool = False
) -> None:
    """As `apply.cut` on a pipeline layer, whose adapters are then cut as their layers were.

    Raises UserError where `cut` does, and where a layer was cut in a way that an adapter cannot follow.
    """
    wrappers = wrappers_in(module)
    hooked = frozenset(name for name in wrappers if not _cuts_weight(plan.rules.get(wildcard(name))))
    with lifted(module, kept=hooked):
        cut(module, "", plan, tensor, config, local_logits=local_logits)
    for name, wrapper in wrappers.items():
        if name not in hooked:
            _follow(wrapper, name, tensor)


def _cuts_weight(rule: Rule | None) -> bool:
    """Whether a rule is one for a layer's weight. Others act on what goes into a layer or comes out of it, so on the
    layer and its adapters together."""
    return rule is not None and ("colwise" in rule.style or "rowwise" in rule.style)


def _follow(wrapper: Any, name: str, tensor: TensorParallel) -> None:
    base = wrapper.base_layer
    shard = shard_of(base.weight)
    if shard is None:
        return  # whole on every rank, and so are its adapters
    if isinstance(base, ColumnParallelLinear):
        for key, linear in list(wrapper.lora_B.items()):
            wrapper.lora_B[key] = _columns(linear, base, shard, tensor)
    elif isinstance(base, RowParallelLinear):
        for key, linear in list(wrapper.lora_A.items()):
            wrapper.lora_A[key] = RowParallelLinear.from_linear(
                linear,
                base.group,
                shard=_same_pieces(shard, tuple(linear.weight.shape), dim=1),
                input_is_parallel=base.input_is_parallel,
            )
    else:
        raise UserError(
            f"{name}: adapters cannot follow a {type(base).__name__}: take it out of the target modules, "
            "or set tensor_parallel.autotp_size to 1"
        )


def _columns(linear: Any, base: ColumnParallelLinear, shard: Shard, tensor: TensorParallel) -> ColumnParallelLinear:
    part = _same_pieces(shard, tuple(linear.weight.shape), dim=0)
    layer = ColumnParallelLinear.from_linear(linear, base.group, shard=part, gather_output=base.gather_output)
    copies = 1 if shard.padding else tensor.size * shard.length // shard.full_shape[shard.dim]
    if copies > 1:  # key/value heads that neighbouring ranks share
        sum_gradients(layer, ["weight", "bias"], sum_of_copies(tensor, copies))
    return layer


def _same_pieces(shard: Shard, full_shape: tuple[int, ...], dim: int) -> Shard:
    """The shard of an adapter's weight, cut along `dim` as its layer's along `shard.dim`."""
    return Shard(full_shape=full_shape, dim=dim, pieces=shard.pieces, padding=shard.padding, owner=shard.owner)
