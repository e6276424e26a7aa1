"""Gradients of a rank without data-parallel neighbours: no copy of them is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from pytest import MonkeyPatch
from torch import Tensor, nn

from harness import Trainer, TrainingArguments


class HalfUsed(nn.Module):
    """A layer with a weight that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.used).sum(-1)


def trained(folder: Path, config: Mapping[str, object]) -> HalfUsed:
    """A layer after one step of AdamW with weight decay."""
    constant: Any = {"max_steps": 1, "save_steps": 0, "lr_scheduler_type": "constant", "learning_rate": 0.1}
    constant |= {"weight_decay": 0.5, "overwrite_output_dir": True}
    settings = {"train_batch_size": 1, **config}
    arguments = TrainingArguments(deepspeed_config=settings, output_dir=str(folder), **constant)
    data = [(torch.tensor([3.0, 4.0]), torch.zeros(1))]
    layer = HalfUsed()
    trainer = Trainer([layer], arguments, data, loss_fn=lambda outputs, labels: outputs.sum())
    trainer.training_step()
    trainer.close()
    return layer


def test_one_rank_steps_by_its_own_gradients(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("gradients are copied")

    monkeypatch.setattr(DeepSpeedEngine, "allreduce_bucket", refuse)
    layer = trained(tmp_path, {"zero_optimization": {"stage": 0}})
    assert torch.allclose(layer.used, torch.tensor(1 - 0.1 * 0.5 - 0.1))  # AdamW's first step is the learning rate
    assert torch.allclose(layer.unused, torch.tensor(1 - 0.1 * 0.5))  # decayed, as by ranks that exchange zeros
