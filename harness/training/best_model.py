"""Which evaluation was the best, when to stop for want of a better one, and its weights at the end."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Unpack

from harness.arguments import TrainingArguments
from harness.checkpoint import training_state
from harness.checkpoint.directories import finished_name
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.training.callbacks import MomentValues, TrainerCallback, TrainerControl, TrainerState
from harness.training.prepare.plan import require_metric_of_one
from harness.training.run import Run


class EarlyStoppingCallback(TrainerCallback):
    """Stops after `early_stopping_patience` evaluations in a row that are not better than the best so far by more than
    `early_stopping_threshold`."""

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.patience, self.threshold = early_stopping_patience, early_stopping_threshold

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002  the signature of every callback
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Unpack[MomentValues],
    ) -> None:
        """Refuse several data sets of which none decides."""
        require_metric_of_one(args, kwargs["trainer"].run.data.evaluation)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Count, and ask for the end; what has not the metric is of another data set."""
        if not has_metric(args, kwargs["metrics"]):
            return
        if improves(args, state, metric_of(args, kwargs["metrics"]), self.threshold):
            state.evaluations_without_best = 0
        else:
            state.evaluations_without_best += 1
        if state.evaluations_without_best >= self.patience:
            control.should_training_stop = True


def own_early_stopping(callback: TrainerCallback) -> TrainerCallback:
    """Return any callback as it is, but transformers' early stopping as ours: it does not know the metric's direction
    where `greater_is_better` is not given, nor where a resumed run stands."""
    kind = type(callback)
    if (kind.__module__, kind.__name__) != ("transformers.trainer_callback", "EarlyStoppingCallback"):
        return callback
    theirs = vars(callback)
    return EarlyStoppingCallback(theirs["early_stopping_patience"], theirs["early_stopping_threshold"] or 0.0)


def asked_for(args: TrainingArguments) -> list[TrainerCallback]:
    """Return the callbacks that the arguments ask for."""
    return [EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else []


def has_metric(args: TrainingArguments, metrics: Mapping[str, object]) -> bool:
    """Whether an evaluation has the metric that says which model is the best."""
    return not metrics.keys().isdisjoint((f"eval_{args.best_metric_name}", args.best_metric_name))


def metric_of(args: TrainingArguments, metrics: Mapping[str, object]) -> float:
    """Return the metric that says which model is the best; UserError if the evaluation has none of that name."""
    name = args.best_metric_name
    found = metrics.get(f"eval_{name}", metrics.get(name))
    if not isinstance(found, int | float):
        raise UserError(
            f"--metric_for_best_model {name}: the evaluation has no such number, but {', '.join(sorted(metrics))}"
        )
    return float(found)


def improves(args: TrainingArguments, state: TrainerState, value: float, threshold: float = 0.0) -> bool:
    """Whether a value is better than the best so far by more than `threshold`."""
    if not isfinite(value) or state.best_metric is None:
        return isfinite(value)
    gain = value - state.best_metric
    return (gain if args.higher_is_better else -gain) > threshold


def note_evaluation(
    args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Mapping[str, object] | None
) -> None:
    """Note the best evaluation of a run; with `--save_strategy best` ask for its checkpoint."""
    if metrics is None or (args.metric_for_best_model is None and not has_metric(args, metrics)):
        return  # no metric was asked for, and none of several data sets is the one that decides
    if improves(args, state, value := metric_of(args, metrics)):
        state.best_metric, state.best_global_step = value, state.global_step
        control.should_save = control.should_save or args.save_strategy == "best"


def best_as_saved(args: TrainingArguments, state: TrainerState) -> JsonObject:
    """Return what a checkpoint says of the best evaluation so far."""
    return {
        "metric": args.best_metric_name,
        "value": state.best_metric,
        "step": state.best_global_step,
        "evaluations_without_best": state.evaluations_without_best,
    }


def restore_best(args: TrainingArguments, state: TrainerState, saved: JsonObject, output_dir: Path) -> None:
    """Go on from what a checkpoint says of the best evaluation, unless another metric decides now."""
    same = saved.get("metric") == args.best_metric_name
    state.best_metric, state.best_global_step = (saved["value"], saved["step"]) if same else (None, 0)
    state.evaluations_without_best = saved["evaluations_without_best"] if same else 0
    state.best_model_checkpoint = None
    note_checkpoint(state, output_dir / finished_name(state.best_global_step))


def note_checkpoint(state: TrainerState, checkpoint: Path) -> None:
    """Note a checkpoint if it is that of the best evaluation."""
    if state.best_global_step and checkpoint.name == finished_name(state.best_global_step) and checkpoint.is_dir():
        state.best_model_checkpoint = str(checkpoint)


def load_best(run: Run, state: TrainerState) -> None:
    """Load the weights of the best evaluation's checkpoint, with `--load_best_model_at_end`; all ranks call it."""
    if not run.args.load_best_model_at_end or state.best_model_checkpoint is None:
        return
    training_state.load(run.engine_state, Path(state.best_model_checkpoint))
    name, step = run.args.best_metric_name, state.best_global_step
    run.console.say(f"loaded the best model: step {step}, {name} {state.best_metric:.6g}")
