"""Go on from a checkpoint, in any layout, with the values that this run was given.

A checkpoint brings back the weights and what the optimizer has gathered. Learning rate, decay, betas, the norm to clip
to and the schedule are those of the arguments and the JSON of the run that resumes, at the step that was reached.
"""

from __future__ import annotations

import copy
from pathlib import Path

from harness.checkpoint import training_state
from harness.checkpoint.directories import (
    TrainingProgress,
    read_manifest,
    require_same_adapters,
    require_same_base,
    require_same_model,
    require_same_optimizer,
)
from harness.checkpoint.integrity import damage, find_resume, run_id
from harness.checkpoint.training_state import load_residue
from harness.data.batches.stream import BatchStream
from harness.data.streaming.source import Streamed
from harness.errors import UserError
from harness.topology.agreement import all_or_none, values_of_all
from harness.training.best_model import restore_best
from harness.training.callbacks import TrainerState
from harness.training.prepare.hyperparameters import changes
from harness.training.prepare.one_model import require_one_model
from harness.training.prepare.plan import intact_checkpoint
from harness.training.run import Run
from harness.wording import counted


def load(run: Run, checkpoint: Path, state: TrainerState, stream: BatchStream | None) -> TrainingProgress:
    """Bring engine, schedule, counters and the stream of samples to where a checkpoint was saved; all ranks call it."""
    progress = training_state.load(run.engine_state, checkpoint)
    listed = all_or_none(lambda: read_manifest(checkpoint).files)
    if not load_residue(run.engine.compression, checkpoint, str(run.layout), listed):
        run.console.say(f"gradient compression: {checkpoint} has no residue of this layout: starting without")
    run.engine.schedule.go_to(progress.step - progress.skipped_steps)
    state.global_step, state.consumed_samples = progress.step, progress.consumed_samples
    of_first_rank = lambda path: values_of_all(damage(path))[0]  # noqa: E731  folders may look different from each host
    if lost := restore_best(run.args, state, progress.best, checkpoint.absolute().parent, of_first_rank):
        run.console.warn(lost)
    if stream is not None:
        stream.consumed = progress.consumed_samples
        if isinstance(stream.dataset, Streamed):
            stream.dataset.seek(progress.stream, progress.consumed_samples)
        state.epoch = stream.epoch
    return progress


def begin_or_resume(run: Run, state: TrainerState, stream: BatchStream | None) -> None:
    """Go on from the checkpoint that the run is to resume; without one require that all ranks hold the same model."""
    if run.checkpoint is not None:
        resume(run, run.checkpoint, state, stream)
    else:
        require_one_model(run.module, run.groups, run.resolved.zero_stage)


def resume_named(run: Run, name: str | Path | bool, state: TrainerState, stream: BatchStream | None) -> None:
    """Resume the checkpoint of this path, or for True the newest whole one; all ranks call it.

    Sets the run's checkpoint and id. UserError, on all ranks alike, if there is none or it does not fit the run.
    """
    args = copy.copy(run.args)
    args.resume_from_checkpoint = "auto" if name is True or name == "auto" else str(Path(str(name)).absolute())
    run.checkpoint = all_or_none(
        lambda: find_resume(run.output_dir, args.resume_from_checkpoint, overwrites=args.overwrite_output_dir)
    )
    run.checkpoint = intact_checkpoint(run, args)
    if run.checkpoint is None and name is True:
        raise UserError(f"train(resume_from_checkpoint=True): no whole checkpoint in {run.output_dir}")
    if run.checkpoint is None:
        return
    require_same_optimizer(run.checkpoint, run.resolved)
    require_same_adapters(run.checkpoint, run.adapters)
    checkpoint = run.checkpoint
    all_or_none(lambda: require_same_base(checkpoint, run.base))
    require_same_model(run.checkpoint, run.trainable.summary, run.trainable.shaping_config)
    resume(run, run.checkpoint, state, stream)
    run.run_id = values_of_all(run_id(run.checkpoint))[0]


def resume(run: Run, checkpoint: Path, state: TrainerState, stream: BatchStream | None) -> None:
    """Go on from a checkpoint; all ranks call it.

    What this run sets to other values than the one that saved is reported, a line each.
    """
    console = run.console
    progress = load(run, checkpoint, state, stream)
    state.skipped_samples += progress.skipped_samples
    console.say(f"resumed from {checkpoint} at step {progress.step}")
    here = f"{run.layout}, ZeRO-{run.resolved.zero_stage}, {run.resolved.precision}"
    there = f"{progress.layout}, ZeRO-{progress.zero_stage}, {progress.precision}"
    if there != here:
        console.say(f"saved with {there}; continuing with {here}")
    if run.data.train is None:  # an evaluation
        return
    if progress.step >= run.max_steps:
        console.say(f"nothing left to train: {counted(run.max_steps, 'step')} done")
    for line in changes(progress.hyperparameters, run.hyperparameters):
        console.warn(line)
    if (progress.seed, progress.data) != (run.args.seed, run.digest):
        console.warn(
            f"{checkpoint} was saved with another seed or other training data: "
            "the order of samples does not continue where it stopped"
        )
