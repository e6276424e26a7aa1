"""Compare a model that was cut for a layout with the whole model, on a tiny copy: logits and every gradient.

The tiny copy (`tiny_copy.py`) has random weights from a seed, the same on every rank. It runs whole in one process, and
then cut, by the code that cuts the real model, as two stages with this rank's part of every tensor. The effect of
rounding is measured: the whole copy runs once more with weights changed by rounding errors. A router may still be at a
tie between two experts, so a difference counts only if other weights and ids show it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from harness.config.model.sharding import shard_range
from harness.errors import UserError, text_of
from harness.hf.causal import CausalModel
from harness.hf.layers.call import LayerOutput
from harness.hf.skeleton import ModelSource
from harness.parallel import comm
from harness.parallel.comm import TensorParallel
from harness.parallel.context.sequence_shards import ALONE, ContextParallel
from harness.parallel.generators import own_generators
from harness.parallel.pipeline.staged_module import Unpacker, build_layers, pack_payload
from harness.parallel.tensor.shard import Shard, shard_of
from harness.verify.tiny_copy import tiny_ids, tiny_model

Cut: TypeAlias = Callable[[ModelSource, TensorParallel], CausalModel]
"""Called with a source and a rank of a tensor-parallel group; returns the cut model, with float32 parameters."""

SEEDS = (0, 1)
RELATIVE = 1e-5  # tolerance relative to a tensor's largest entry, for sums in another order
NOISE = 50  # tolerance as a multiple of the effect of rounding errors in the weights
LEAST = 1e-7  # tolerance relative to the largest of all gradients; smaller ones are noise
ROUNDING = 2e-7
NOT_CAUSAL = "its logits depend on later tokens, so it is not a causal decoder"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between the cut model and the whole one.

    Attributes:
        what: the logits, the gradient of a parameter, or the error that was raised.
        off: the largest difference, relative to the largest entry.
        tensor_parallel: whether the model was also cut over tensor-parallel ranks, and not only into stages.
        context: whether context ranks shared the tokens.
    """

    what: str
    off: float
    tensor_parallel: bool
    context: bool = False

    def __str__(self) -> str:
        return self.what if self.off == float("inf") else f"{self.what} off by {self.off:.1g} of its largest entry"


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """The result of a forward and backward: logits, and the gradient of every parameter by name."""

    logits: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class UncutModel:
    """The tiny copy as one process runs it.

    Attributes:
        ids: its input, [rows, tokens].
        allowed: the tolerance of each number.
    """

    model: PreTrainedModel
    ids: Tensor
    numbers: ModelNumbers
    allowed: ModelNumbers


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups of ranks that share the cut model: its tensors, its tokens, or, as `neighbours`, its experts."""

    tensor: TensorParallel
    context: ContextParallel
    neighbours: TensorParallel

    def difference(self, what: str, off: float) -> Difference:
        """Return a difference that was found on these ranks."""
        return Difference(what=what, off=off, tensor_parallel=self.tensor.size > 1, context=self.context.size > 1)


def find_difference(
    config: PretrainedConfig,
    cut: Cut,
    tensor: TensorParallel,
    device: torch.device,
    context: ContextParallel = ALONE,
    neighbours: TensorParallel = comm.ALONE,
) -> Difference | None:
    """Return the largest difference between the cut and the whole model of a tiny config; None if there is none.

    The model is cut into two stages and, if `tensor` has a group, over its tensor-parallel ranks; `cut` gives each rank
    of `context` a shard of the tokens, or distributes the experts over `neighbours`, which have the same tokens.
    All ranks of these groups must call this, and get the same result.

    Raises:
        UserError: the model cannot be cut.
    """
    found = None
    ranks = RankGroups(tensor=tensor, context=context, neighbours=neighbours)
    with own_generators(0, device):
        for seed in SEEDS:
            found = worst_of(_try(cut, _run_whole(config, seed, device), ranks), tensor, context)
            found = worst_of(found, neighbours)
            if found is None:
                break
    return found


def on_device(model: Any, device: torch.device) -> PreTrainedModel:
    """Return the model on `device`."""
    moved: PreTrainedModel = model.to(device)
    return moved


@torch.no_grad()
def looks_ahead(config: PretrainedConfig, device: torch.device) -> bool:
    """Return whether logits of a tiny config's model depend on later tokens, which a decoder's must not."""
    model = on_device(tiny_model(config), device)
    ids = tiny_ids(model).to(device)
    half = ids.shape[1] // 2
    other = torch.cat([ids[:, :half], ids[:, half:].flip(1)], dim=1)
    before, after = (model(input_ids=given, use_cache=False).logits[:, :half] for given in (ids, other))
    return bool((before - after).abs().max() > 1e-3 * before.abs().max())


def worst_of(own: Difference | None, tensor: TensorParallel, context: ContextParallel = ALONE) -> Difference | None:
    """Return the largest difference that any rank of the groups has found; all of them must call this."""
    for ranks in (tensor, context):
        found = [own]
        if ranks.size > 1:
            found = [None] * ranks.size
            dist.all_gather_object(found, own, group=ranks.group)
        own = max((one for one in found if one is not None), key=lambda one: one.off, default=None)
    return own


def _try(cut: Cut, whole: UncutModel, ranks: RankGroups) -> Difference | None:
    try:
        return _compare(cut, whole, ranks)
    except UserError:
        raise
    except Exception as error:  # a wrong plan may raise anything
        return ranks.difference(f"{type(error).__name__} ({text_of(error, 120)})", float("inf"))


def _run_whole(config: PretrainedConfig, seed: int, device: torch.device) -> UncutModel:
    """Run the tiny copy whole; a second run, with weights changed by rounding errors, gives the tolerance."""
    model, moved = (on_device(tiny_model(config, seed=seed), device) for _ in range(2))
    ids = tiny_ids(model, seed).to(device)
    whole = _run(model, ids)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            sign = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + ROUNDING * sign)
    other = _run(moved, ids)
    least = LEAST * max(_largest(gradient).item() for gradient in whole.gradients.values())

    def allowed(a: Tensor, b: Tensor) -> Tensor:
        # the gradient of a scalar is a sum over all tokens and columns, which nearly cancel: rounding is larger than
        # the result
        floor = 10 * least if a.numel() == 1 else least
        return torch.clamp(RELATIVE * _largest(a) + NOISE * _largest(a - b), min=floor)

    tolerance = ModelNumbers(
        logits=allowed(whole.logits, other.logits),
        gradients={name: allowed(tensor, other.gradients[name]) for name, tensor in whole.gradients.items()},
    )
    return UncutModel(model=model, ids=ids, numbers=whole, allowed=tolerance)


def _run(model: PreTrainedModel, ids: Tensor) -> ModelNumbers:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * _direction(logits)).sum().backward()
    gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
    return ModelNumbers(logits=logits.detach(), gradients=gradients)


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in a tensor; 0 for an empty one (a config may ask for layers of no width)."""
    return tensor.abs().max() if tensor.numel() else tensor.new_zeros(())


def _direction(logits: Tensor) -> Tensor:
    """Return a gradient for the logits: any numbers, the same on every rank and for every cut."""
    drawn = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    return drawn.to(logits.device) / logits[..., 0].numel()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _compare(cut: Cut, whole: UncutModel, ranks: RankGroups) -> Difference | None:
    """Return how the cut model differs."""
    # made from the config, as on ranks that read a file
    source = replace(ModelSource.of_model(whole.model), model=None)
    stages = [cut(source, ranks.tensor) for _ in range(2)]  # each runs a forward of its own, as ranks do
    depth = len(stages[0].layers)
    built = [build_layers(stages[0].layers, 0, depth // 2, 0), build_layers(stages[1].layers, depth // 2, depth, 0)]
    value: LayerOutput = whole.ids
    for stage in built:
        value = Unpacker()(pack_payload(value))
        for layer in stage.calls:
            value = layer(value)
    logits = whole.numbers.logits
    wanted, direction, permitted = (
        ranks.context.own(_own_logits(each, stages[0], ranks.tensor)) if each.shape == logits.shape else each
        for each in (logits, _direction(logits), whole.allowed.logits)
    )
    (value * direction).sum().backward()
    modules = [module for stage in built for module in stage.modules.values()]
    _sum_gradients(modules, ranks.context)
    found = [_difference("logits", value.detach(), wanted, permitted, logits)]
    found += _gradient_differences(modules, whole, ranks.neighbours.size)
    worst = max((pair for pair in found if pair is not None), key=lambda pair: pair[1], default=None)
    return None if worst is None else ranks.difference(*worst)


def _sum_gradients(modules: list[nn.Module], context: ContextParallel) -> None:
    """Sum the gradients over the context ranks; each rank has only those of its own tokens' logits."""
    if context.group is None:
        return
    for parameter in {id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad, group=context.group)


def _own_logits(whole: Tensor, stage: CausalModel, tensor: TensorParallel) -> Tensor:
    """Return this rank's part of logits for the whole vocabulary."""
    if not stage.local_logits:
        return whole
    start, stop = shard_range(whole.shape[-1], tensor.rank, tensor.size)
    return whole[..., start:stop]


def _gradient_differences(modules: list[nn.Module], whole: UncutModel, times: int) -> list[tuple[str, float] | None]:
    """Compare all gradients; `times`: the number of ranks that send the same tokens to this rank's experts."""
    model = whole.model
    expected = whole.numbers.gradients
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    own: dict[str, Tensor] = {}
    shards: dict[str, Shard | None] = {}
    parameters = {id(p): (name, p) for module in modules for name, p in module.named_parameters()}  # a shared one once
    for name, parameter in parameters.values():
        key = names[name]  # tied weights have one name in the whole model, and the gradients of all stages are summed
        own[key] = own[key] + _gradient(parameter) if key in own else _gradient(parameter)
        shards[key] = shard_of(parameter)
    missing = [name for name, gradient in expected.items() if name not in own and gradient.any()]
    found: list[tuple[str, float] | None] = [(f"{name}, which belongs to no layer,", float("inf")) for name in missing]
    for key, gradient in own.items():
        full = expected[key]
        shard = shards[key]
        wanted = full if shard is None else shard.take(full)
        if shard is not None and shard.over_data:
            gradient = gradient / times
        found.append(_difference(f"the gradient of {key}", gradient, wanted, whole.allowed.gradients[key], full))
    return found


def _difference(what: str, own: Tensor, wanted: Tensor, allowed: Tensor, full: Tensor) -> tuple[str, float] | None:
    if own.shape != wanted.shape:
        return f"{what} is {tuple(own.shape)} instead of {tuple(wanted.shape)}", float("inf")
    off = _largest(own - wanted)
    if bool(off <= allowed):  # False for NaN
        return None
    return what, (off / _largest(full).clamp(min=1e-30)).nan_to_num(nan=float("inf")).item()
