"""Track the best evaluation, and load the best model's weights at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.checkpoint.directories import NAME, finished_name
from harness.checkpoint.integrity import damage
from harness.checkpoint.training_state import damage_on_any
from harness.config.values.json_object import JsonObject
from harness.training.callbacks import TrainerControl, TrainerState
from harness.training.callbacks.early_stopping import has_metric, improves, metric_of
from harness.training.prepare.run import Run


def note_evaluation(
    args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Mapping[str, object] | None
) -> None:
    """Record an evaluation if it is the best of the run so far.

    With `--save_strategy best` or `--load_best_model_at_end`, also request a checkpoint: regular saves may fall on
    other steps.
    """
    if metrics is None or (args.metric_for_best_model is None and not has_metric(args, metrics)):
        return  # several data sets, and no metric is named to compare them by
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
    """Restore the best evaluation from a checkpoint, unless the deciding metric has changed.

    Args:
        saved: the result of `best_as_saved`.
        problem_with: returns the first problem of a checkpoint, the same on all ranks; None if it is intact.

    Returns:
        A warning if `--load_best_model_at_end` could not load that evaluation's checkpoint: the search for the best
        then starts again.
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
    # Early stopping and `--save_strategy best` compare only the metric: they go on without the checkpoint.
    if not args.load_best_model_at_end:
        return None
    forget_unsaved(args, state)
    return f"the best evaluation so far, {best}, has no checkpoint ({checkpoint}: {problem}): it no longer counts"


def note_checkpoint(state: TrainerState, checkpoint: Path, metric: float | None) -> None:
    """Record a complete checkpoint as the best one; do nothing if `metric`, its best value, is None."""
    if metric is not None:
        state.best_model_checkpoint = str(checkpoint)
        state.best_saved_metric = metric


def forget_unsaved(args: TrainingArguments, state: TrainerState) -> None:
    """With `--load_best_model_at_end`, fall back to the best evaluation that has a checkpoint.

    A later evaluation that beats it is saved, even if the lost one was better.
    """
    if args.load_best_model_at_end:
        held = NAME.fullmatch(Path(state.best_model_checkpoint or "").name)
        state.best_global_step = int(held[1]) if held else 0
        state.best_metric = state.best_saved_metric


def load_best(run: Run) -> None:
    """With `--load_best_model_at_end`, load the weights of the best evaluation's checkpoint; all ranks call it.

    If that checkpoint is missing or damaged, the model keeps its last weights, with a warning.
    """
    if not run.spec.args.load_best_model_at_end:
        return
    state = run.state
    kept = f"the model keeps the weights of the last step, {state.global_step}"
    if state.best_model_checkpoint is None:
        run.console.warn(f"no evaluation has a checkpoint that could be loaded as the best model: {kept}")
        return
    checkpoint = Path(state.best_model_checkpoint)
    if (problem := damage_on_any(checkpoint)) is not None:
        state.best_model_checkpoint = None
        run.console.warn(f"the best model cannot be loaded: {checkpoint} is damaged ({problem}): {kept}")
        return
    step = run.engine_state.load(checkpoint).step
    run.console.say(f"loaded the best model: {_named(run.spec.args, step, state.best_saved_metric)}")
    if step != state.best_global_step:
        lost = _named(run.spec.args, state.best_global_step, state.best_metric)
        run.console.warn(f"it is the best that was saved: a better one, {lost}, has no checkpoint")


def _named(args: TrainingArguments, step: int, metric: float | None) -> str:
    return f"step {step}" + ("" if metric is None else f", {args.best_metric_name} {metric:.6g}")
