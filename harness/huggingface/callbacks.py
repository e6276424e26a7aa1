"""Callbacks that are written for HuggingFace's Trainer."""

from __future__ import annotations

from collections.abc import Callable

from harness.errors import UserError
from harness.training.callbacks import MOMENTS, TrainerCallback, parameters_of
from harness.training.parts import needed

NOT_GIVEN = {
    "tokenizer": "name it processing_class",
    "train_dataloader": "there is none here: take trainer.train_dataset",
    "eval_dataloader": "there is none here: take trainer.eval_dataset",
}

NOT_CALLED = {
    "on_substep_end": "on_step_end",
    "on_pre_optimizer_step": "on_step_end",
    "on_optimizer_step": "on_step_end",
    "on_prediction_step": "on_evaluate or on_predict",
    "on_push_begin": "on_save",
}
"""HuggingFace's callback methods that are never called here -> what to use instead."""


def accept_callback(
    callback: TrainerCallback, early_stopping: Callable[[int, float], TrainerCallback] | None = None
) -> TrainerCallback:
    """Return the callback to call for a user's; `early_stopping` makes the harness's for a patience and a threshold.

    Raises UserError if it has a method that is never called here, or takes a keyword that is never passed.
    """
    _require_called(callback)
    return _own_early_stopping(callback, early_stopping)


def _require_called(callback: TrainerCallback) -> None:
    """Raise UserError if a callback has a method that is never called, or takes a keyword that is never passed."""
    for name in (*NOT_CALLED, *MOMENTS):
        method = getattr(callback, name, None)
        if method is None or getattr(method, "__module__", "").startswith("transformers."):
            continue
        where = f"{type(callback).__name__}.{name}"
        if name in NOT_CALLED:
            raise UserError(f"callback {where} is never called here: use {NOT_CALLED[name]}")
        for keyword in parameters_of(getattr(method, "__func__", method)).keys() & NOT_GIVEN.keys():
            raise UserError(f"callback {where} takes {keyword}: {NOT_GIVEN[keyword]}")


def _own_early_stopping(
    callback: TrainerCallback, early_stopping: Callable[[int, float], TrainerCallback] | None
) -> TrainerCallback:
    """Replace transformers' EarlyStoppingCallback by ours; return any other callback unchanged.

    The one in transformers minimises every metric unless `greater_is_better` is given, and a resume resets its count.
    """
    kind = type(callback)
    if (kind.__module__, kind.__name__) != ("transformers.trainer_callback", "EarlyStoppingCallback"):
        return callback
    theirs = vars(callback)
    make = needed(early_stopping, "EarlyStoppingCallback", "harness.extras")
    return make(theirs["early_stopping_patience"], theirs["early_stopping_threshold"] or 0.0)
