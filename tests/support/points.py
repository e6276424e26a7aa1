"""Runs of one linear layer on a few points, for tests of when a run saves, evaluates, stops and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from harness import Trainer, TrainerCallback, TrainingArguments

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)] * 5  # more than a chunk to evaluate
Make: TypeAlias = Callable[..., Trainer]


def make_in(
    folder: Path,
    *callbacks: TrainerCallback,
    batch: int = 4,
    train: object = POINTS[:8],
    evaluation: object = POINTS,
    name: str = "run",
    **arguments: Any,
) -> Trainer:
    """Return a Trainer whose output is `folder/name`; its first weights are always the same."""
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 2}
    args = TrainingArguments(str(folder / name), deepspeed_config=config, **{"save_steps": 2, **arguments})
    torch.manual_seed(0)
    return Trainer([nn.Linear(2, 1)], args, train, evaluation, loss_fn=nn.functional.mse_loss, callbacks=callbacks)


def finish(trainer: Trainer) -> int:
    """Train to the end, close the trainer, and return the last step."""
    trainer.train()
    trainer.close()
    return trainer.state.global_step
