"""Track the best evaluation, stop early, and load the best model's weights at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Unpack

import torch.distributed as dist

from harness.arguments import TrainingArguments
from harness.checkpoint.directories import NAME, finished_name
from harness.checkpoint.integrity import changed_file, damage
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.topology.agreement import value_of_first, values_of_all
from harness.training.callbacks import MomentValues, TrainerCallback, TrainerControl, TrainerState
from harness.training.prepare.plan import require_metric_of_one
from harness.training.prepare.run import Run


class EarlyStoppingCallback(TrainerCallback):
    """Stops training after `early_stopping_patience` evaluations in a row without an improvement.

    An evaluation improves if it beats the best so far by more than `early_stopping_threshold`.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.patience = early_stopping_patience
        self.threshold = early_stopping_threshold

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002  the signature of every callback
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Unpack[MomentValues],
    ) -> None:
        """Raise UserError for several evaluation data sets if `metric_for_best_model` names no metric of one."""
        require_metric_of_one(args, kwargs["trainer"].run.data.evaluation)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Count evaluations without improvement, and request the end of training after `patience` of them."""
        if not has_metric(args, kwargs["metrics"]):
            return  # an evaluation of another data set
        if improves(args, state, metric_of(args, kwargs["metrics"]), self.threshold):
            state.evaluations_without_best = 0
        else:
            state.evaluations_without_best += 1
        if state.evaluations_without_best >= self.patience:
            control.should_training_stop = True


def own_early_stopping(callback: TrainerCallback) -> TrainerCallback:
    """Replace transformers' EarlyStoppingCallback by ours; return any other callback unchanged.

    The one in transformers minimises every metric unless `greater_is_better` is given, and loses its count at a resume.
    """
    kind = type(callback)
    if (kind.__module__, kind.__name__) != ("transformers.trainer_callback", "EarlyStoppingCallback"):
        return callback
    theirs = vars(callback)
    return EarlyStoppingCallback(theirs["early_stopping_patience"], theirs["early_stopping_threshold"] or 0.0)


def has_metric(args: TrainingArguments, metrics: Mapping[str, object]) -> bool:
    """Return whether an evaluation has the metric that decides which model is the best."""
    return not metrics.keys().isdisjoint((f"eval_{args.best_metric_name}", args.best_metric_name))


def metric_of(args: TrainingArguments, metrics: Mapping[str, object]) -> float:
    """Return the metric that decides which model is the best. UserError if the evaluation has no such number."""
    name = args.best_metric_name
    found = metrics.get(f"eval_{name}", metrics.get(name))
    if not isinstance(found, int | float):
        raise UserError(
            f"--metric_for_best_model {name}: the evaluation has no such number, but {', '.join(sorted(metrics))}"
        )
    return float(found)


def improves(args: TrainingArguments, state: TrainerState, value: float, threshold: float = 0.0) -> bool:
    """Return whether a value is better than the best so far by more than `threshold`."""
    if not isfinite(value) or state.best_metric is None:
        return isfinite(value)
    gain = value - state.best_metric
    return (gain if args.higher_is_better else -gain) > threshold


def note_evaluation(
    args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Mapping[str, object] | None
) -> None:
    """Record an evaluation if it is the best of the run so far.

    Then also request a checkpoint with `--save_strategy best` or `--load_best_model_at_end`: regular saves may be at
    other steps.
    """
    if metrics is None or (args.metric_for_best_model is None and not has_metric(args, metrics)):
        return  # several data sets, and no metric that decides is named
    if improves(args, state, value := metric_of(args, metrics)):
        state.best_metric = value
        state.best_global_step = state.global_step
        control.should_save |= args.save_strategy == "best" or args.load_best_model_at_end


def best_as_saved(args: TrainingArguments, state: TrainerState) -> JsonObject:
    """Return the best evaluation so far as JSON for a checkpoint."""
    return {
        "metric": args.best_metric_name,
        "value": state.best_metric,
        "step": state.best_global_step,
        "evaluations_without_best": state.evaluations_without_best,
    }


def restore_best(
    args: TrainingArguments,
    state: TrainerState,
    saved: JsonObject,
    output_dir: Path,
    problem_with: Callable[[Path], str | None] = damage,
) -> str | None:
    """Restore the best evaluation from a checkpoint, unless another metric decides now.

    Args:
        saved: the result of `best_as_saved`.
        problem_with: returns what is wrong with a checkpoint, the same on all ranks.

    Returns:
        A warning if `--load_best_model_at_end` could not load that evaluation's checkpoint: the best is then searched
        anew.
    """
    same = saved.get("metric") == args.best_metric_name
    state.best_metric, state.best_global_step = (saved["value"], saved["step"]) if same else (None, 0)
    state.evaluations_without_best = saved["evaluations_without_best"] if same else 0
    state.best_model_checkpoint = state.best_saved_metric = None
    if not state.best_global_step:
        return None
    checkpoint = output_dir / finished_name(state.best_global_step)
    problem = problem_with(checkpoint)
    if problem is None:
        note_checkpoint(state, checkpoint, state.best_metric)
        return None
    best = _named(args, state.best_global_step, state.best_metric)
    if not args.load_best_model_at_end:
        return None
    forget_unsaved(args, state)
    return f"the best evaluation so far, {best}, has no checkpoint ({checkpoint}: {problem}): it no longer counts"


def note_checkpoint(state: TrainerState, checkpoint: Path, metric: float | None) -> None:
    """Record a complete checkpoint if it is of a best evaluation; `metric` is that evaluation's value, else None."""
    if metric is not None:
        state.best_model_checkpoint = str(checkpoint)
        state.best_saved_metric = metric


def forget_unsaved(args: TrainingArguments, state: TrainerState) -> None:
    """With `--load_best_model_at_end`, fall back to the best evaluation that has a checkpoint.

    A later evaluation that beats this one is then saved, even if the lost one was better.
    """
    if args.load_best_model_at_end:
        held = NAME.fullmatch(Path(state.best_model_checkpoint or "").name)
        state.best_global_step = int(held[1]) if held else 0
        state.best_metric = state.best_saved_metric


def load_best(run: Run) -> None:
    """With `--load_best_model_at_end`, load the weights of the best evaluation's checkpoint; all ranks call it.

    If that checkpoint is missing or damaged, the model keeps its last weights, with a warning.
    """
    if not run.args.load_best_model_at_end:
        return
    state = run.state
    kept = f"the model keeps the weights of the last step, {state.global_step}"
    if state.best_model_checkpoint is None:
        run.console.warn(f"no evaluation has a checkpoint that could be loaded as the best model: {kept}")
        return
    checkpoint = Path(state.best_model_checkpoint)
    # All ranks must decide alike: use rank 0's view of the folder, then verify it together.
    problem = value_of_first(damage(checkpoint))
    if problem is None:
        found = values_of_all(changed_file(checkpoint, dist.get_rank(), dist.get_world_size()))
        problem = next(filter(None, found), None)
    if problem is not None:
        state.best_model_checkpoint = None
        run.console.warn(f"the best model cannot be loaded: {checkpoint} is damaged ({problem}): {kept}")
        return
    step = run.engine_state.load(checkpoint).step
    run.console.say(f"loaded the best model: {_named(run.args, step, state.best_saved_metric)}")
    if step != state.best_global_step:
        lost = _named(run.args, state.best_global_step, state.best_metric)
        run.console.warn(f"it is the best that was saved: a better one, {lost}, has no checkpoint")


def _named(args: TrainingArguments, step: int, metric: float | None) -> str:
    return f"step {step}" + ("" if metric is None else f", {args.best_metric_name} {metric:.6g}")
