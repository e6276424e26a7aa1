"""A run that was stopped, or goes on in another way, ends where it would have ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.resilience.process import signals

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)] * 5  # more than a chunk to evaluate
Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def trainer(
        *callbacks: TrainerCallback,
        batch: int = 4,
        train: object = POINTS[:8],
        evaluation: object = POINTS,
        name: str = "run",
        **arguments: Any,
    ) -> Trainer:
        config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 2}
        args = TrainingArguments(str(tmp_path / name), deepspeed_config=config, **{"save_steps": 2, **arguments})
        torch.manual_seed(0)
        return Trainer([nn.Linear(2, 1)], args, train, evaluation, loss_fn=nn.functional.mse_loss, callbacks=callbacks)

    return trainer


def finish(trainer: Trainer) -> int:
    trainer.train()
    trainer.close()
    return trainer.state.global_step


@pytest.mark.parametrize(("batch", "steps"), [(2, 10), (4, 6), (8, 4)])
def test_another_batch_takes_the_steps_that_the_epochs_need(batch: int, steps: int, make: Make, tmp_path: Path) -> None:
    class Rates(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    rates: list[float] = []
    finish(make(num_train_epochs=1))
    then = make(Rates(), batch=batch, num_train_epochs=3, resume_from_checkpoint="auto", learning_rate=1.0)
    assert finish(then) == then.state.max_steps == steps
    assert then.state.epoch == 3
    assert rates[-1] == pytest.approx(1 / steps)  # linear to 0 at the end
    if steps != 6:
        late = make(batch=batch, num_train_epochs=3, name="late")
        with pytest.raises(UserError, match=f"takes {steps} steps: give resume_from_checkpoint to TrainingArguments"):
            late.train(resume_from_checkpoint=tmp_path / "run/checkpoint-2")
        late.close()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    while not signals.received():
        time.sleep(0.001)


@pytest.mark.parametrize("within", [False, True])
def test_an_evaluation_that_a_signal_left_out_is_made_up_for(within: bool, make: Make, tmp_path: Path) -> None:
    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not within:
                kill()

    class Points(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if within and stopped.state.global_step == 2 and not signals.received():
                kill()
            return super().__getitem__(index)

    kept = {"eval_steps": 2, "max_steps": 4, "load_best_model_at_end": True}
    whole = make(name="whole", **kept)
    finish(whole)
    stopped = make(Kill(), **kept)
    stopped.run.set_evaluation(Points(POINTS), is_new=False)
    with pytest.raises(SystemExit):
        stopped.train()
    stopped.close()
    resumed = make(resume_from_checkpoint="auto", **kept)
    finish(resumed)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "evaluations.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    ]
    told = [[(row["step"], row["eval_loss"]) for row in each] for each in rows]
    assert told[0] == told[1] and [step for step, _ in told[0]] == [2, 4]
    assert resumed.state.best_metric == whole.state.best_metric


def test_an_evaluation_that_fails_costs_no_step(make: Make, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    failing = make(Fails(), max_steps=4, save_steps=500, eval_steps=3)
    with pytest.raises(ZeroDivisionError):
        failing.train()
    failing.close()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert finish(make(max_steps=4, eval_steps=3, resume_from_checkpoint="auto")) == 4
    assert [json.loads(line)["step"] for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()] == [
        3,
        4,
    ]


def test_an_empty_evaluation_set_is_refused_before_the_first_step(make: Make) -> None:
    with pytest.raises(UserError, match="eval_dataset_none is empty: give at least one sample, or no data set"):
        make(evaluation={"some": POINTS, "none": []})


def test_a_run_that_has_stopped_early_trains_no_further(make: Make) -> None:
    kept = {"max_steps": 9, "eval_steps": 2, "learning_rate": 0.0, "early_stopping_patience": 1}
    assert finish(make(**kept)) == 4
    assert finish(make(resume_from_checkpoint="auto", **kept)) == 4
    assert finish(make(resume_from_checkpoint="auto", **{**kept, "early_stopping_patience": 2})) == 6


def test_the_best_checkpoint_stays_however_the_path_of_the_resumed_one_is_spelled(make: Make, tmp_path: Path) -> None:
    kept = {
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so the first evaluation stays the best
        "metric_for_best_model": "loss",
    }
    finish(make(max_steps=4, **kept))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    then = make(max_steps=8, resume_from_checkpoint=str(tmp_path / "link/checkpoint-4"), **kept)
    finish(then)
    assert then.state.best_model_checkpoint == str(tmp_path / "run/checkpoint-2")
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}


def test_an_evaluation_of_an_older_checkpoint_leaves_the_newer_ones(make: Make, tmp_path: Path) -> None:
    finish(make(max_steps=4))
    looking = make(train=None, resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    looking.evaluate()
    looking.close()
    assert {path.name for path in (tmp_path / "run").glob("*-*")} == {"checkpoint-2", "checkpoint-4"}
