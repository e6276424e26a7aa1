"""The best evaluation, when a run stops early, and what a checkpoint says of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import TrainingArguments, UserError
from harness.checkpoint.integrity import damage
from harness.extras import best_model
from harness.extras.best_model import note_evaluation, restore_best
from harness.extras.early_stopping import EarlyStoppingCallback, improves, metric_of
from harness.training.callbacks import TrainerControl, TrainerState
from tests.unit.checkpoint.saved import save


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="unused", **changes)


@pytest.mark.parametrize(
    ("changes", "best", "value", "wanted"),
    [
        ({}, None, 3.0, True),  # the first is the best so far
        ({}, None, float("nan"), False),
        ({}, 3.0, float("inf"), False),
        ({}, 3.0, 2.9, True),
        ({}, 3.0, 3.0, False),
        ({"metric_for_best_model": "accuracy"}, 0.5, 0.6, True),
        ({"metric_for_best_model": "accuracy"}, 0.5, 0.4, False),
        ({"metric_for_best_model": "eval_perplexity"}, 9.0, 8.0, True),  # lower is better, with the prefix or without
        ({"metric_for_best_model": "error", "greater_is_better": False}, 0.5, 0.4, True),
        ({"metric_for_best_model": "my_loss", "greater_is_better": True}, 0.5, 0.6, True),
    ],
)
def test_a_value_is_better_in_the_direction_of_its_metric(
    changes: dict[str, Any], best: float | None, value: float, wanted: bool
) -> None:
    assert improves(arguments(**changes), TrainerState(best_metric=best), value) is wanted


def test_a_threshold_must_be_exceeded() -> None:
    state = TrainerState(best_metric=3.0)
    assert not improves(arguments(), state, 2.5, threshold=0.5)
    assert improves(arguments(), state, 2.25, threshold=0.5)


def test_a_metric_is_found_with_and_without_the_prefix() -> None:
    args = arguments(metric_for_best_model="accuracy")
    assert metric_of(args, {"eval_accuracy": 1, "accuracy": 2}) == 1.0
    assert metric_of(args, {"accuracy": 2}) == 2.0


@pytest.mark.parametrize("metrics", [{"eval_loss": 1.0}, {"eval_loss": 1.0, "eval_accuracy": "high"}])
def test_an_evaluation_without_the_metric_is_refused_with_those_that_it_has(metrics: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--metric_for_best_model accuracy: .* eval_loss"):
        metric_of(arguments(metric_for_best_model="accuracy"), metrics)


def test_early_stopping_counts_evaluations_in_a_row() -> None:
    callback, state, control = EarlyStoppingCallback(2), TrainerState(), TrainerControl()
    args, seen = arguments(), []
    for loss in (3.0, 3.5, 2.0, 2.0, 2.5):
        metrics = {"eval_loss": loss}
        callback.on_evaluate(args, state, control, metrics=metrics)
        note_evaluation(args, state, control, metrics)
        seen.append((state.evaluations_without_best, control.should_training_stop))
    assert seen == [(0, False), (1, False), (0, False), (1, False), (2, True)]


@pytest.mark.parametrize(
    ("given", "saves"),
    [
        ({"save_strategy": "best"}, True),
        ({"save_strategy": "steps"}, False),
        ({"save_strategy": "steps", "load_best_model_at_end": True}, True),
        ({"save_strategy": "epoch", "load_best_model_at_end": True}, True),
    ],
)
def test_the_best_evaluation_asks_for_its_checkpoint_where_that_is_needed(given: dict[str, Any], saves: bool) -> None:
    args = arguments(**given, eval_strategy="steps", eval_steps=2)
    state, control = TrainerState(global_step=4), TrainerControl()
    note_evaluation(args, state, control, {"eval_loss": 2.0})
    assert (state.best_metric, state.best_global_step, control.should_save) == (2.0, 4, saves)
    later = TrainerControl()
    state.global_step = 6
    note_evaluation(args, state, later, {"eval_loss": 2.0})
    assert state.best_global_step == 4 and not later.should_save


def test_a_resumed_run_goes_on_from_the_best_of_the_same_metric(tmp_path: Path) -> None:
    args = arguments()
    state = TrainerState(best_metric=2.0, best_global_step=4, evaluations_without_best=1)
    saved = best_model.best_as_saved(args, state)
    save(tmp_path, 4)
    again = TrainerState()
    assert restore_best(args, again, saved, tmp_path, damage) is None
    assert again.best_saved_metric == 2.0
    assert (again.best_metric, again.best_global_step, again.evaluations_without_best) == (2.0, 4, 1)
    assert again.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    gone = TrainerState(best_model_checkpoint="old")
    restore_best(args, gone, saved, tmp_path / "elsewhere", damage)  # its checkpoint is not there any more
    assert gone.best_metric == 2.0 and gone.best_model_checkpoint is None
    asked = arguments(load_best_model_at_end=True, eval_steps=2)
    told = restore_best(asked, gone, saved, tmp_path / "elsewhere", damage)
    assert told is not None and "step 4, loss 2, has no checkpoint" in told and "no such directory" in told
    assert (gone.best_metric, gone.best_global_step) == (None, 0)  # the next evaluation is the best, and saved
    other = TrainerState()
    restore_best(arguments(metric_for_best_model="accuracy"), other, saved, tmp_path, damage)
    assert (other.best_metric, other.best_global_step, other.best_model_checkpoint) == (None, 0, None)
    assert other.evaluations_without_best == 0
