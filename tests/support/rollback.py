"""Runs that go back to a checkpoint, for the tests in one process and on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from tests.support.training import second_host

STEPS, BATCH, WIDTH = 7, 4, 4
MARK = 120
BAD = 18
"""The place in the order of samples of one that makes the loss NaN: in the fifth step."""


class Points:
    """Samples in the order in which they are drawn; those whose place is in `bad` are not finite."""

    def __init__(self, bad: set[int]) -> None:
        from harness.batches.order import batch_indices

        self.x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
        order = batch_indices(0, 64, 64, 42)
        self.y = self.x[:, :1].clamp(-1, 1)
        for place in bad:
            self.x[order[place]] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


def trainer(folder: str, *, stages: int = 1, zero: int = 0, bad: set[int] | None = None, **more: Any) -> Trainer:
    """Return a trainer of a few linear layers."""
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "pipeline": {"stages": stages, "partition": "uniform"},
        "zero_optimization": {"stage": zero},
    }
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "nonfinite": "rollback",
        **more,
    }
    arguments = TrainingArguments(deepspeed_config=config, output_dir=folder, **settings)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    data = Points({BAD} if bad is None else bad)
    return Trainer(layers, arguments, train_dataset=data, loss_fn=nn.functional.mse_loss)


def rows(folder: str | Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl says of each step, without times."""
    names = ("step", "loss", "grad_norm", "learning_rate", "consumed_samples")
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[name] for name in names) for line in lines]


def train(folder: str, **settings: Any) -> str:
    """Train to the end; return the message of the UserError that ends the run, empty without one."""
    ours = trainer(folder, **settings)
    try:
        ours.train()
    except UserError as error:
        return str(error)
    finally:
        ours.close()
    return ""


def without_the_batch(folder: str, **settings: Any) -> None:
    """Train on the same samples, the bad batch left out from the beginning."""
    ours = trainer(folder, **settings)
    ours.state.skipped_samples.append([16, 20])
    ours.train()
    ours.close()


def in_layouts(layouts: list[tuple[int, int]], folder: str) -> list[list[Any]]:
    """For each (stages, ZeRO stage): what a run that goes back has done, and one that leaves the batch out."""
    found = []
    for stages, zero in layouts:
        back, never = (f"{folder}/{stages}-{zero}-{name}" for name in ("back", "never"))
        with second_host():
            message = train(back, stages=stages, zero=zero)
        without_the_batch(never, stages=stages, zero=zero)
        found.append([message, rows(back), rows(never)])
    return found


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The usual loss, but NaN where a label says so."""
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    return loss * float("nan") if bool((labels == MARK).any()) else loss


def with_tensor_parallelism(model: str, folder: str) -> list[list[tuple[Any, ...]]]:
    """The same comparison for a decoder whose layers are divided, and whose loss fails for one sample."""
    from harness.batches.order import batch_indices

    order = batch_indices(0, 32, 32, 42)
    data = [{"input_ids": [(7 * i + k) % 100 for k in range(16)]} for i in range(32)]
    data[order[BAD]] = {"input_ids": [MARK] * 16}
    found = []
    for name, skipped in (("back", []), ("never", [[16, 20]])):
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 1},
        }
        arguments = TrainingArguments(
            deepspeed_config=config,
            output_dir=f"{folder}/tp-{name}",
            max_steps=STEPS,
            save_steps=3,
            nonfinite="rollback",
        )
        ours = Trainer(model, arguments, train_dataset=data, loss_fn=next_token_loss)
        ours.state.skipped_samples += skipped
        ours.train()
        ours.close()
        found.append(rows(f"{folder}/tp-{name}"))
    return found
