"""The optimizer and the learning rate's schedule, where the DeepSpeed JSON leaves them to the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from harness.training.arguments import TrainingArguments


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices are decayed; biases and the scales of norms are not, as in HF."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if len(_shape(p)) > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if len(_shape(p)) <= 1], "weight_decay": 0.0},
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


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The parameter's whole shape; ZeRO-3 keeps it aside while the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
