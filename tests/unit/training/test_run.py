"""A run opens what it needs, and lets go of all of it: groups, memory, the lock on its directory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from harness.checkpoint.run_lock import HELD
from harness.resilience.process.distributed import open_groups
from harness.training.prepare.run import release, training_stream

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]
CONFIG = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    def trainer(name: str = "run", data: object = POINTS, **arguments: object) -> Trainer:
        args = TrainingArguments(str(tmp_path / name), deepspeed_config=CONFIG, max_steps=1, save_steps=0, **arguments)
        return Trainer([nn.Linear(2, 1)], args, data, loss_fn=nn.functional.mse_loss)

    return trainer


def test_a_run_leaves_the_groups_that_were_there_and_no_lock(make: Callable[..., Trainer]) -> None:
    make().close()  # the world itself stays, as others of the process may use it
    before = open_groups()
    trainer = make()
    assert open_groups() > before and trainer.run.foreign_groups == before
    assert trainer.run.output_dir in HELD
    trainer.close()
    assert open_groups() == before and trainer.run.output_dir not in HELD


def test_to_let_go_of_a_run_again_leaves_the_next_one_alone(make: Callable[..., Trainer]) -> None:
    first = make("first")
    first.close()
    second = make("second")
    release(first.run)
    second.train()
    assert second.state.global_step == 1 and second.run.output_dir in HELD
    second.close()


def test_the_memory_of_a_run_is_free_though_the_trainer_lives(make: Callable[..., Trainer]) -> None:
    trainer = make()
    trainer.train()
    held = [weakref.ref(parameter) for parameter in trainer.run.module.parameters()]
    assert all(reference() is not None for reference in held)
    trainer.close()
    gc.collect()
    assert all(reference() is None or not vars(reference()) for reference in held)
    assert vars(trainer.run.engine.deepspeed) == {}


def test_samples_are_read_by_the_plan_of_the_run_and_without_data_there_are_none(make: Callable[..., Trainer]) -> None:
    with closing(make()) as trainer:
        stream = training_stream(trainer.run)
        assert stream is not None and (stream.micro_batch, stream.accumulation, stream.global_batch) == (2, 2, 4)
        assert [inputs.shape for inputs, _ in stream.next_step()] == [(2, 2), (2, 2)]
    with closing(make("evaluates", None)) as trainer:
        assert training_stream(trainer.run) is None


def test_noise_on_embeddings_needs_embeddings(make: Callable[..., Trainer]) -> None:
    with pytest.raises(UserError, match=r"^--neftune_noise_alpha needs a HuggingFace model, not a list of layers$"):
        make(neftune_noise_alpha=5.0)
