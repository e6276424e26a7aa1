"""Data sets and collators that draw random numbers: ranks that must read the same do, or it is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

BASE = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
STAGES = {"pipeline": {"stages": 2, "partition": "uniform"}}


class NoisyPoints(torch.utils.data.Dataset):
    """Points of the plane, seen through noise."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([i / self.n, 1 - i / self.n]) + torch.rand(2) * random.random()
        return x, x.sum(0, keepdim=True)


def noisy(samples: list[Any]) -> Any:
    """Collate, with noise that the labels know of."""
    noise = torch.from_numpy(np.random.randn(len(samples), 2)).float()
    inputs = torch.stack([x for x, _ in samples]) + noise
    return inputs, torch.stack([y for _, y in samples]) + noise.sum(1, keepdim=True)


def rank_dependent(samples: list[Any]) -> Any:
    inputs, labels = noisy(samples)
    return inputs + dist.get_rank(), labels + dist.get_rank()


def trainer(config: dict[str, Any], folder: str, evaluated: int = 5, **options: Any) -> Trainer:
    linear = [LayerSpec(nn.Linear, *sizes) for sizes in ((2, 16), (16, 16), (16, 1))]
    layers = [linear[0], nn.Dropout(0.3), torch.tanh, linear[1], nn.Dropout(0.3), linear[2]]
    arguments: Any = dict(max_steps=9, learning_rate=1e-2, save_steps=0, lr_scheduler_type="constant")
    arguments = TrainingArguments(deepspeed_config=config, output_dir=folder, **arguments)
    options = {
        "train_dataset": NoisyPoints(20),
        "eval_dataset": NoisyPoints(evaluated),
        "data_collator": noisy,
        **options,
    }
    return Trainer(layers, arguments, loss_fn=nn.functional.mse_loss, **options)


def losses(configs: list[dict[str, Any]], folder: str) -> list[list[float]]:
    """Of each config the losses of three steps and of an evaluation."""
    found = []
    for index, config in enumerate(configs):
        run = trainer(config, f"{folder}/{index}")
        found.append([run.training_step().loss for _ in range(3)] + [run.evaluate()["eval_loss"]])
        run.close()
    return found


def refused(folder: str) -> list[str]:
    """What is said to data that depends on the rank, and to evaluation data that differ in length."""
    said = []
    run = trainer({**BASE, **STAGES}, folder, data_collator=rank_dependent)
    for use in (run.training_step, run.evaluate, lambda: run.evaluate(NoisyPoints(4 + 3 * dist.get_rank()))):
        with pytest.raises(UserError) as error:
            use()
        said.append(str(error.value))
    with pytest.raises(UserError) as error:
        trainer({**BASE, **STAGES}, folder, evaluated=4 + 3 * dist.get_rank())
    return [*said, str(error.value)]


def both(configs: list[dict[str, Any]], folder: str) -> tuple[list[list[float]], list[str]]:
    return losses(configs, folder), refused(f"{folder}/refused")


def test_noise_is_the_same_in_every_layout_and_on_all_ranks_that_read_it(tmp_path: Path) -> None:
    alone = run_ranks(1, losses, [BASE], str(tmp_path))[0][0]
    zero3 = {**BASE, "zero_optimization": {"stage": 3}}
    ranks = run_ranks(2, both, [{**BASE, **STAGES}, BASE, zero3], str(tmp_path))
    for found, (training, evaluation, other, start) in ranks:
        for curve in found:
            assert curve == pytest.approx(alone, rel=1e-5)
        assert training.startswith("rank 1 got different samples than rank 0 for the same micro-batch:")
        assert evaluation == training
        assert "rank 1 has another evaluation data than rank 0" in other and "\n" not in other
        assert "rank 1 has another evaluation data than rank 0" in start
    assert ranks[0][1] == ranks[1][1]
