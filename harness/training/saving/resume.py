"""Go on from a checkpoint, in any layout, with the values that this run was given.

A checkpoint brings back the weights and what the optimizer has gathered. Learning rate, decay, betas, the norm to clip
to and the schedule are those of the arguments and the JSON of the run that resumes, at the step that was reached.
"""

from __future__ import annotations

from pathlib import Path

from harness.checkpoint import training_state
from harness.checkpoint.directories import Progress
from harness.training.prepare.hyperparameters import changes
from harness.training.prepare.run import PreparedRun


def resume(run: PreparedRun, checkpoint: Path) -> Progress:
    """Load a checkpoint into the engine of `run`; all ranks call it. Returns how far the run had come.

    The schedule must still be as it was built; it goes on at the step that was reached. What this run sets to other
    values than the one that saved is reported, a line each.
    """
    console, plan = run.console, run.plan
    progress = training_state.load(run.engine_state, checkpoint)
    run.engine.schedule.go_to(progress.step - progress.skipped_steps)
    console.say(f"resumed from {checkpoint} at step {progress.step}")
    here = f"{plan.layout}, ZeRO-{plan.resolved.zero_stage}, {plan.resolved.precision}"
    there = f"{progress.layout}, ZeRO-{progress.zero_stage}, {progress.precision}"
    if there != here:
        console.say(f"saved with {there}; continuing with {here}")
    if progress.step >= plan.max_steps:
        console.say(f"all {plan.max_steps} steps are done: nothing left to train")
    for line in changes(progress.hyperparameters, run.hyperparameters):
        console.warn(line)
    if plan.data.train is not None and (progress.seed, progress.data) != (run.args.seed, plan.digest):
        console.warn(
            f"{checkpoint} was saved with another seed or other training data: "
            "the order of samples does not continue where it stopped"
        )
    return progress
