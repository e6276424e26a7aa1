"""A model that is cut for tensor parallelism held to the whole one, on the ranks that the cut is for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.parallel.plans.experts import run_where_aligned
from harness.parallel.tensor.shard import Shard, shard_of


def whole_grads(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Every gradient, put together on the host through the shards; NaN where no rank or two own an element."""
    grads = {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}
    shards = {name: shard_of(param) for name, param in model.named_parameters() if name in grads}
    own = [(name, shard, grads[name]) for name, shard in shards.items() if shard is not None]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    for parts in zip(*everyone, strict=True):
        grads[parts[0][0]] = _whole(parts)
    return grads


def _whole(parts: tuple[tuple[str, Shard, Tensor], ...]) -> Tensor:
    """One gradient, put together from what each rank holds of it."""
    _, shard, grad = parts[0]
    full, owners = grad.new_zeros(shard.full_shape), grad.new_zeros(shard.full_shape)
    for _, part, part_grad in parts:
        if part.owner:
            part.put(part_grad, full)
            part.put(torch.ones_like(part_grad), found := torch.zeros_like(full))
            owners += found
    return full.masked_fill(owners != 1, float("nan"))


def logits_of(model: Any, vocabulary: int) -> Tensor:
    """The logits of a model after its backward, for the same tokens always."""
    drawn = torch.randint(vocabulary, (2, 2, 13), generator=torch.Generator().manual_seed(1), device="cpu")
    ids, labels = drawn.to(model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach()


@dataclass(frozen=True)
class Uncut:
    """What a whole model comes to: its logits, and its gradients on the host."""

    logits: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any, vocabulary: int, *, aligned: bool = True) -> Uncut:
        """Run a copy of the model, which itself gets no gradients; `aligned`: whether its experts' widths are."""
        whole = copy.deepcopy(model)
        if not aligned:
            run_where_aligned(whole, torch.float32)
        logits = logits_of(whole, vocabulary)
        named = whole.named_parameters()
        return cls(logits, {name: param.grad.cpu() for name, param in named if param.grad is not None})


def differences(whole: Uncut, part: Any, group: dist.ProcessGroup, vocabulary: int) -> dict[str, float]:
    """The largest difference of the logits and of each gradient, relative to the whole model's largest value of its
    kind; that of a gradient which only one of them has is infinite."""
    logits, wanted = whole.logits, whole.gradients
    got = logits_of(part, vocabulary)
    grads = whole_grads(part, group)
    scale = max(grad.abs().max() for grad in wanted.values())
    errors = {"logits": ((got - logits).abs().max() / logits.abs().max()).item()}
    errors |= {name: float("inf") for name in grads.keys() ^ wanted.keys()}
    # The gradient of a key's bias is zero but for rounding: hence a floor under what it is compared with.
    for name in grads.keys() & wanted.keys():
        difference, largest = (grads[name] - wanted[name]).abs().max(), wanted[name].abs().max()
        errors[name] = (difference / largest.clamp_min(scale / 100)).item()
    return errors
