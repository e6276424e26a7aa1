"""Gradient clipping for a plain fp32 engine (ZeRO stage 0).

DeepSpeed's own counts a tied weight once for each stage that holds it, leaves out what is whole on the later stages,
and does not keep the norm. The other optimizers of DeepSpeed (ZeRO, fp16, bf16) count right and keep it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.topology.groups import Groups


def clip_and_keep_norm(engine: Any, groups: Groups) -> None:
    """Let `engine` clip by the norm over all ranks' parameters, each counted once, and keep that norm."""

    def clip() -> None:
        norm = gradient_norm(engine.module.parameters(), groups)
        engine._global_grad_norm = norm
        limit = engine.gradient_clipping()
        if limit:
            scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    engine.clip_fp32_gradients = lambda: None
    engine.basic_optimizer.register_step_pre_hook(lambda *_: clip())


def gradient_norm(parameters: Iterable[nn.Parameter], groups: Groups) -> torch.Tensor:
    """Euclidean norm of the gradients of the whole model, a scalar; equal on all ranks."""
    counted = [p.grad.norm() for p in parameters if p.grad is not None and _counts(p, groups.coordinate.tensor)]
    device = counted[0].device if counted else torch.device("cpu")
    total = torch.stack(counted).float().square().sum() if counted else torch.zeros((), device=device)
    for group in (groups.tensor, groups.pipeline):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def _counts(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank counts the parameter: its own shard, or as the first of those that hold it whole."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False)
