"""The optimizer and the learning rate's schedule, where the DeepSpeed JSON leaves them to the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from harness.training.arguments import TrainingArguments

NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters that are not decayed; transformers' `Trainer.get_decay_parameter_names` has the same."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with weight decay and without, chosen by name and module as in HF's Trainer.

    HF decays whatever is no bias and no parameter of a norm, vectors among them (`A_log`, `sinks`).
    """
    decayed = set(get_parameter_names(module, [nn.LayerNorm], NOT_DECAYED))
    chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            chosen[name in decayed].append(parameter)
    groups = [
        {"params": chosen[True], "weight_decay": weight_decay},
        {"params": chosen[False], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(groups: list[dict[str, Any]], args: TrainingArguments) -> Optimizer:
    """torch's AdamW, fused: nothing has to be compiled, on no device."""
    return torch.optim.AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


def schedule(args: TrainingArguments, max_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Makes transformers' schedule of that name for an optimizer."""

    def make(optimizer: Optimizer) -> LRScheduler:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.warmup(max_steps),
            num_training_steps=max_steps,
        )

    return make
