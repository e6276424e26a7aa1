"""Go on from a checkpoint with the values that this run was given.

DeepSpeed's checkpoint brings back every value it was saved with: learning rate, decay, betas, the norm to clip to, the
schedule with its length. Here the arguments and the JSON of the run that resumes decide instead, and the schedule is
the one that they make, at the step that was reached.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from harness.checkpoint import state
from harness.checkpoint.directories import Progress
from harness.deepspeed.engine import put_back_scaler
from harness.training.engine.muon import ParameterGroup
from harness.training.prepare.hyperparameters import changes
from harness.training.prepare.run import PreparedRun


@dataclass(frozen=True)
class FreshValues:
    """What an engine was built with, before a checkpoint is loaded into it.

    Attributes:
        groups: each parameter group without its parameters.
        clip: norm to which ZeRO's optimizers clip; None where the optimizer holds none.
        scaler: of the loss in fp16; None elsewhere.
    """

    groups: list[ParameterGroup]
    clip: float | None
    scaler: Any

    @classmethod
    def of(cls, engine: DeepSpeedEngine) -> FreshValues:
        """Return the values that `engine` holds now."""
        optimizer = engine.optimizer
        return cls(
            groups=[
                {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
            clip=getattr(optimizer, "clip_grad", None),
            scaler=getattr(optimizer, "loss_scaler", None),
        )

    def put_back(self, engine: DeepSpeedEngine) -> None:
        """Give `engine`, which has just loaded a checkpoint, these values again; its schedule goes to its step.

        The schedule must still be as it was built. Moments, weights and the running loss scale stay as loaded.
        """
        optimizer = engine.optimizer
        for group, fresh in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(fresh)
        if self.clip is not None:
            optimizer.clip_grad = self.clip
        if self.scaler is not None:
            put_back_scaler(optimizer, self.scaler)
        _advance(engine.lr_scheduler, engine.global_steps - engine.skipped_steps, engine.train_batch_size())


def resume(run: PreparedRun, checkpoint: Path) -> Progress:
    """Load a checkpoint into the engine of `run`: weights, moments, random numbers; all ranks call it.

    Returns how far the run had come. What this run sets to other values than the one that saved is reported, a line
    each.
    """
    engine, console, plan = run.engine.deepspeed, run.console, run.plan
    fresh = FreshValues.of(engine)
    progress = state.load(engine, checkpoint)
    fresh.put_back(engine)
    console.say(f"resumed from {checkpoint} at step {progress.step}")
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


def _advance(scheduler: Any, steps: int, train_batch: int) -> None:
    """Bring a schedule that was just built to where it stands after `steps` steps."""
    if scheduler is None or steps == 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer steps, which the checkpoint has done
        if isinstance(scheduler, LambdaLR):  # a function of the step alone
            scheduler.last_epoch = steps - 1
            scheduler._step_count = steps  # noqa: SLF001  # torch's own, which `step` counts up
            scheduler.step()
        elif hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own, likewise; they count from 0
            scheduler.step(steps - 1)
        else:
            for _ in range(steps):
                # DeepSpeed gives this one the batch size for a loss
                scheduler.step(*([train_batch] if isinstance(scheduler, ReduceLROnPlateau) else []))
