"""A run that was stopped, or goes on in another way, ends where it would have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness import TrainerCallback, UserError
from tests.support.points import POINTS, Make, finish


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


def test_an_evaluation_of_an_older_checkpoint_leaves_the_newer_ones(make: Make, tmp_path: Path) -> None:
    finish(make(max_steps=4))
    looking = make(train=None, resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    looking.evaluate()
    looking.close()
    assert {path.name for path in (tmp_path / "run").glob("*-*")} == {"checkpoint-2", "checkpoint-4"}
