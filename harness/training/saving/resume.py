"""Resume a checkpoint in any layout.

A checkpoint restores the weights and the optimizer's states. Learning rate, decay, betas, clipping and schedule come
from the arguments and the JSON of the resuming run, at the step that was reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.batches.order import OwnOrder
from harness.checkpoint.directories import TrainingProgress, read_manifest
from harness.checkpoint.integrity import run_id
from harness.checkpoint.resumption import saved_run
from harness.checkpoint.training_state import load_residue
from harness.config import Resolved
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.topology.agreement import all_or_none, broadcast_object
from harness.training.engine.optimizer import GivenOptimizer
from harness.training.prepare.one_model import require_one_model
from harness.training.prepare.run import Run
from harness.wording import counted

OF_ADAMW = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
NAMES = {  # path in the JSON -> the argument for the same value
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas.0": "adam_beta1",
    "optimizer.params.betas.1": "adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "gradient_clipping": "max_grad_norm",
}
SECTIONS = ("optimizer", "scheduler", "fp16", "gradient_clipping", "train_batch_size")


def load(run: Run, checkpoint: Path) -> TrainingProgress:
    """Restore engine, schedule, counters and the stream of samples from a checkpoint; all ranks call it."""
    state = run.state
    stream = run.stream
    progress = run.engine_state.load(checkpoint)
    listed = all_or_none(lambda: read_manifest(checkpoint).files)
    if not load_residue(run.engine.compression, checkpoint, str(run.spec.layout), listed):
        run.console.say(f"gradient compression: {checkpoint} has no residue of this layout: starting without")
    # A skipped step does not advance the learning-rate schedule.
    run.engine.schedule.go_to(progress.step - progress.skipped_steps)
    state.global_step = progress.step
    state.consumed_samples = progress.consumed_samples
    run.evaluation_due = progress.evaluation_due
    # The best checkpoint's name is saved without its folder. Compared as resolved, since a path has several spellings.
    is_own = checkpoint.resolve().parent == run.spec.output_dir.resolve()
    folder = run.spec.output_dir if is_own else checkpoint.absolute().parent
    best_model = run.spec.parts.best_model
    if best_model is not None and (lost := best_model.restore_best(run.spec.args, state, progress.best, folder)):
        run.console.warn(lost)
    if stream is not None:
        stream.consumed = progress.consumed_samples
        if isinstance(stream.dataset, OwnOrder):
            stream.dataset.seek(progress.stream, progress.consumed_samples)
        state.epoch = stream.epoch
    return progress


def begin_or_resume(run: Run) -> None:
    """Resume the run's checkpoint, or check that all ranks hold the same new model. All ranks call it."""
    if run.checkpoint is not None:
        resume(run, run.checkpoint)
    else:
        require_one_model(run.module, run.groups, run.spec.resolved.zero_stage)


def resume_named(run: Run, name: str | Path | bool) -> None:
    """Resume the checkpoint at a path, or for True the newest complete one; all ranks call it.

    Sets the run's checkpoint and id. Raises UserError on all ranks if no checkpoint is found, or it does not fit.
    """
    spec = run.spec
    wanted = "auto" if name is True or name == "auto" else str(Path(str(name)).absolute())
    saved = saved_run(replace(spec.resume_request, wanted=wanted), run.console)
    run.checkpoint = None if saved is None else saved.checkpoint
    if saved is None and name is True:
        raise UserError(f"train(resume_from_checkpoint=True): no whole checkpoint in {spec.output_dir}")
    if saved is None:
        return
    # Only rank 0 has the checksums: if they differ, all ranks must fail.
    all_or_none(partial(saved.require_same_base, run.base_checksums))
    saved.require_same_model(run.trainable.summary, run.trainable.shaping_config)
    if spec.samples is not None:
        _, steps = spec.resolved_at(saved.progress)
        # The learning-rate schedule is already built for max_steps.
        if steps != spec.max_steps:
            raise UserError(
                f"train(resume_from_checkpoint={name!r}): {saved.checkpoint} was saved with another global batch, so "
                f"--num_train_epochs takes {steps} steps: give resume_from_checkpoint to TrainingArguments instead"
            )
    resume(run, saved.checkpoint)
    run.run_id = broadcast_object(run_id(saved.checkpoint))


def resume(run: Run, checkpoint: Path) -> None:
    """Resume a checkpoint; all ranks call it.

    Reports each setting that differs from the saved run's, one line each.
    """
    console = run.console
    progress = load(run, checkpoint)
    # In place, as the stream holds the same list.
    run.state.skipped_samples += progress.skipped_samples
    console.say(f"resumed from {checkpoint} at step {progress.step}")
    here = f"{run.spec.layout}, ZeRO-{run.spec.resolved.zero_stage}, {run.spec.resolved.precision}"
    there = f"{progress.layout}, ZeRO-{progress.zero_stage}, {progress.precision}"
    if there != here:
        console.say(f"saved with {there}; continuing with {here}")
    if run.spec.samples is None:  # an evaluation
        return
    if progress.step >= run.spec.max_steps:
        console.say(f"nothing left to train: {counted(progress.step, 'step')} done, max_steps is {run.spec.max_steps}")
    now = hyperparameters(run.spec.args, run.spec.resolved, run.spec.max_steps, run.spec.user_optimizer)
    for line in changes(progress.hyperparameters, now):
        console.warn(line)
    if (progress.seed, progress.data) != (run.spec.args.order_seed, run.spec.data_digest):
        console.warn(
            f"{checkpoint} was saved with another seed or other training data: "
            "the order of samples does not continue where it stopped"
        )


def hyperparameters(
    args: TrainingArguments, resolved: Resolved, max_steps: int, user_optimizer: GivenOptimizer | None = None
) -> JsonObject:
    """Return the settings that affect the remaining steps, under their names as flags or in the JSON."""
    config = resolved.config
    values = JsonObject()
    if user_optimizer is None:
        values |= {} if "optimizer" in config else {name: getattr(args, name) for name in OF_ADAMW}
        # Also for an optimizer in the JSON that does not state it.
        values["learning_rate"] = args.learning_rate
    else:
        values |= _flat("optimizers", user_optimizer.hyperparameters)
    if "scheduler" not in config and (user_optimizer is None or user_optimizer.scheduler is None):
        values.update(lr_scheduler_type=args.lr_scheduler_type, warmup_steps=args.warmup(max_steps))
        values.update(max_steps=max_steps)
        values.update(_flat("lr_scheduler_kwargs", args.lr_scheduler_kwargs or {}))
    for section in SECTIONS:
        if section in config:
            values.update({NAMES.get(name, name): value for name, value in _flat(section, config[section])})
    # Another optimizer is refused, not reported.
    values.pop("optimizer.type", None)
    return values


def changes(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return one line for each value that differs between a checkpoint and this run."""
    lines = []
    for name in (*saved, *(name for name in now if name not in saved)):
        before, after = (str(values.get(name, "not set")) for values in (saved, now))
        # As values too, for which 1 and 1.0 are equal.
        if before != after and saved.get(name, before) != now.get(name, after):
            uses = f", which uses {after}" if name in now else ""
            lines.append(f"{name}: {before} in the checkpoint, {after} in this run{uses}")
    return lines if saved else []


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for each leaf of a section."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value
