"""The gradient norm that is reported and clipped by, where DeepSpeed's own is not exact.

A plain fp32 engine (ZeRO stage 0) counts a tied weight once for each stage that holds it, leaves out what is whole on
the later stages, and does not keep the norm. The optimizer for bf16 sums squares in float32, which loses a part in a
thousand of a tensor of 20 million elements. ZeRO's optimizers count right and sum in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from harness.deepspeed.engine import clip_before_step, has_bf16_optimizer, is_counted_elsewhere, sum_norm_with
from harness.topology.groups import Groups

BLOCK = 2**20
"""Elements that are summed at once: a CPU copies what it sums in float64."""


def correct_clipping(engine: DeepSpeedEngine, groups: Groups, *, skip_nonfinite: bool) -> None:
    """Let `engine` clip by the exact norm over all ranks' parameters, each counted once, and keep that norm.

    `skip_nonfinite`: a plain torch optimizer makes no update where the norm is not finite, and its attribute
    `overflow` says so, as DeepSpeed's own optimizers do. All ranks know the same norm, so all of them skip.
    """
    if has_bf16_optimizer(engine):
        sum_norm_with(engine.optimizer, square_sum)
    elif not engine.zero_optimization():
        clip_before_step(engine, partial(_clip, engine, groups), skip_nonfinite=skip_nonfinite)


def gradient_norm(parameters: Iterable[nn.Parameter], groups: Groups, device: torch.device) -> Tensor:
    """Euclidean norm of the gradients of the whole model, a float64 scalar on `device`; equal on all ranks."""
    counted = (p.grad for p in parameters if p.grad is not None and _counts(p, groups.coordinate.tp_rank))
    total = square_sum(counted, device)
    for group in (groups.tp_group, groups.pp_group):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def square_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, a float64 scalar on `device`; 0 where there is no tensor."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for block in tensor.detach().reshape(-1).split(BLOCK):
            total += torch.linalg.vector_norm(block, dtype=torch.float64).square()
    return total


def _clip(engine: DeepSpeedEngine, groups: Groups) -> Tensor:
    """Scale all gradients so that their norm is at most the engine's limit; return the norm before."""
    norm = gradient_norm(engine.module.parameters(), groups, engine.device)
    limit = engine.gradient_clipping()
    if limit:
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0).float()
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return norm


def _counts(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank counts the parameter: its own shard, or as the first of those that hold it whole."""
    if is_counted_elsewhere(parameter):
        return False
    return tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False)
