"""Early stopping, and the comparison of two evaluations.

Imports neither torch nor DeepSpeed, so that a script can import `EarlyStoppingCallback` quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Unpack

from harness.arguments import TrainingArguments
from harness.errors import UserError
from harness.training.callbacks import MomentValues, TrainerCallback, TrainerControl, TrainerState
from harness.wording import counted


class EarlyStoppingCallback(TrainerCallback):
    """Stops training after `early_stopping_patience` consecutive evaluations without improvement.

    An evaluation improves if it beats the best so far by more than `early_stopping_threshold`.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.patience = early_stopping_patience
        self.threshold = early_stopping_threshold

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Unpack[MomentValues],
    ) -> None:
        """Stop at once if the resumed run had stopped early.

        Raises UserError if there are several evaluation data sets and `metric_for_best_model` names no metric of one.
        """
        trainer = kwargs["trainer"]
        require_metric_of_one(args, trainer.eval_dataset)
        if state.evaluations_without_best >= self.patience:
            control.should_training_stop = True
            trainer.console.say(
                f"early stopping at step {state.global_step}: no improvement in "
                f"{counted(state.evaluations_without_best, 'evaluation')}; a larger patience continues the run"
            )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Count evaluations without improvement; request the end of training after `patience` of them."""
        if not has_metric(args, kwargs["metrics"]):
            return  # an evaluation of another data set
        if improves(args, state, metric_of(args, kwargs["metrics"]), self.threshold):
            state.evaluations_without_best = 0
        else:
            state.evaluations_without_best += 1
        if state.evaluations_without_best >= self.patience:
            control.should_training_stop = True


def has_metric(args: TrainingArguments, metrics: Mapping[str, object]) -> bool:
    """Return whether an evaluation has the metric that decides the best model."""
    return not metrics.keys().isdisjoint((f"eval_{args.best_metric_name}", args.best_metric_name))


def metric_of(args: TrainingArguments, metrics: Mapping[str, object]) -> float:
    """Return the metric that decides the best model. Raises UserError if the evaluation has no such number."""
    name = args.best_metric_name
    found = metrics.get(f"eval_{name}", metrics.get(name))
    if not isinstance(found, int | float):
        raise UserError(
            f"--metric_for_best_model {name}: the evaluation has no such number, but {', '.join(sorted(metrics))}"
        )
    return float(found)


def improves(args: TrainingArguments, state: TrainerState, value: float, threshold: float = 0.0) -> bool:
    """Return whether a value beats the best so far by more than `threshold`."""
    if not isfinite(value) or state.best_metric is None:
        return isfinite(value)
    gain = value - state.best_metric
    return (gain if args.higher_is_better else -gain) > threshold


def require_metric_of_one(args: TrainingArguments, evaluation: object) -> None:
    """Raise UserError for several data sets if `metric_for_best_model` does not name the metric of one."""
    if isinstance(evaluation, Mapping) and args.metric_for_best_model is None:
        name = next(iter(evaluation))
        raise UserError(
            f"eval_dataset has several data sets: say whose metric decides which model is the best, as "
            f"metric_for_best_model={name + '_loss'!r}"
        )
