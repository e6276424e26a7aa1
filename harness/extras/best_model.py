"""Track the best evaluation, and load the best model's weights at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.checkpoint.directories import NAME, TrainingProgress, finished_name
from harness.checkpoint.integrity import damage
from harness.checkpoint.training_state import damage_on_any
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.extras.early_stopping import has_metric, improves, metric_of
from harness.extras.early_stopping import require_metric_of_one as require_metric_of_one  # of the interface `BestModel`
from harness.topology.agreement import broadcast_object
from harness.training.callbacks import TrainerControl, TrainerState


def note_evaluation(
    args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Mapping[str, object]
) -> None:
    """Record an evaluation if it is the best of the run so far.

    With `--save_strategy best` or `--load_best_model_at_end`, also request a checkpoint: regular saves may fall on
    other steps.
    """
    if args.metric_for_best_model is None and not has_metric(args, metrics):
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


def _damage_on_first_rank(checkpoint: Path) -> str | None:
    # Hosts may see different files, and would go on with different best models.
    return broadcast_object(damage(checkpoint))


def restore_best(
    args: TrainingArguments,
    state: TrainerState,
    saved: JsonObject,
    output_dir: Path,
    problem_with: Callable[[Path], str | None] = _damage_on_first_rank,
) -> str | None:
    """Restore the best evaluation from a checkpoint, unless the deciding metric has changed; all ranks call it.

    Args:
        saved: the result of `best_as_saved`; {} if no best evaluation was tracked.
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
        state.best_model_checkpoint = str(checkpoint)
        state.best_saved_metric = state.best_metric
        return None
    best = _named(args, state.best_global_step, state.best_metric)
    # Early stopping and `--save_strategy best` compare only the metric: they go on without the checkpoint.
    if not args.load_best_model_at_end:
        return None
    forget_unsaved(args, state)
    return f"the best evaluation so far, {best}, has no checkpoint ({checkpoint}: {problem}): it no longer counts"


def forget_unsaved(args: TrainingArguments, state: TrainerState) -> None:
    """With `--load_best_model_at_end`, fall back to the best evaluation that has a checkpoint.

    A later evaluation that beats it is saved, even if the lost one was better.
    """
    if args.load_best_model_at_end:
        held = NAME.fullmatch(Path(state.best_model_checkpoint or "").name)
        state.best_global_step = int(held[1]) if held else 0
        state.best_metric = state.best_saved_metric


def load_best(
    args: TrainingArguments, state: TrainerState, load: Callable[[Path], TrainingProgress], console: Console
) -> None:
    """With `--load_best_model_at_end`, load the weights of the best evaluation's checkpoint; all ranks call it.

    If that checkpoint is missing or damaged, the model keeps its last weights, with a warning.
    """
    if not args.load_best_model_at_end:
        return
    kept = f"the model keeps the weights of the last step, {state.global_step}"
    if state.best_model_checkpoint is None:
        console.warn(f"no evaluation has a checkpoint that could be loaded as the best model: {kept}")
        return
    checkpoint = Path(state.best_model_checkpoint)
    if (problem := damage_on_any(checkpoint)) is not None:
        state.best_model_checkpoint = None
        console.warn(f"the best model cannot be loaded: {checkpoint} is damaged ({problem}): {kept}")
        return
    step = load(checkpoint).step
    console.say(f"loaded the best model: {_named(args, step, state.best_saved_metric)}")
    if step != state.best_global_step:
        lost = _named(args, state.best_global_step, state.best_metric)
        console.warn(f"it is the best that was saved: a better one, {lost}, has no checkpoint")


def _named(args: TrainingArguments, step: int, metric: float | None) -> str:
    return f"step {step}" + ("" if metric is None else f", {args.best_metric_name} {metric:.6g}")
