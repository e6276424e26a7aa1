"""How many graphs a run has compiled after each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch._dynamo import reset
from torch._dynamo.utils import counters

from harness import Trainer, TrainerCallback, TrainingArguments
from tests.support.models import model_of


def tokens(length: int) -> dict[str, list[int]]:
    return {"input_ids": [(7 * place + length) % 250 for place in range(length)]}


def graphs_of_steps(
    folder: Path,
    rows: list[dict[str, list[int]]],
    backend: str,
    options: Mapping[str, object] = MappingProxyType({}),
    **flags: Any,
) -> list[int]:
    """Train a step on each row; return how many graphs had been compiled after each step.

    `options`: of the section `compile`.
    """
    counted: list[int] = []

    class Count(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            counted.append(counters["stats"]["unique_graphs"])

    reset()
    counters.clear()
    config = {"train_micro_batch_size_per_gpu": 1, "compile": {"enabled": True, "backend": backend, **options}}
    args = TrainingArguments(
        str(folder),
        deepspeed_config=config,
        max_steps=len(rows),
        save_steps=0,
        gradient_accumulation_steps=1,
        **flags,
    )
    with closing(Trainer(model_of("qwen3").config, args, rows, rows[:1] if "eval_steps" in flags else None)) as trainer:
        trainer.add_callback(Count())
        trainer.train()
    return counted
