"""Go on from a checkpoint with the values that this run was given.

DeepSpeed's checkpoint brings back every value it was saved with: learning rate, decay, betas, the norm to clip to, the
schedule with its length. Here the arguments and the JSON of the run that resumes decide instead, and the schedule is
the one that they make, at the step that was reached.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from harness.checkpoint import state
from harness.checkpoint.directories import require_same_adapters, require_same_run
from harness.checkpoint.integrity import damaged
from harness.config import Resolved
from harness.training.arguments import TrainingArguments
from harness.training.prepare import startup_report

if TYPE_CHECKING:
    from harness.training.trainer import Trainer

OF_ADAMW = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
NAMES = {  # of values in the JSON that are arguments otherwise
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas.0": "adam_beta1",
    "optimizer.params.betas.1": "adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "gradient_clipping": "max_grad_norm",
}
OF_LOSS_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SECTIONS = ("optimizer", "scheduler", "fp16", "gradient_clipping", "train_batch_size")


@dataclass(frozen=True)
class FreshValues:
    """What an engine was built with, before a checkpoint is loaded into it.

    Attributes:
        groups: each parameter group without its parameters.
        clip: norm to which ZeRO's optimizers clip; None where the optimizer holds none.
        scaler: of the loss in fp16; None elsewhere.
    """

    groups: list[dict[str, Any]]
    clip: float | None
    scaler: Any

    @classmethod
    def of(cls, engine: DeepSpeedEngine) -> FreshValues:
        """The values that `engine` holds now."""
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
            _go_on_scaling(self.scaler, optimizer.loss_scaler)
            optimizer.loss_scaler = self.scaler
            optimizer.dynamic_loss_scale = self.scaler.dynamic
        _advance(engine.lr_scheduler, engine.global_steps - engine.skipped_steps, engine.train_batch_size())


def intact(checkpoint: Path | None, trainer: Trainer) -> Path | None:
    """The checkpoint to resume once its content is known to be what was saved; all ranks call it.

    With `auto` it is an older one where it is not. Says which are left out, and whether the run begins at step 0.
    """
    args, output_dir = trainer.args, trainer.output_dir
    auto = args.resume_from_checkpoint == "auto"
    incomplete = damaged(output_dir, checkpoint) if auto else []
    chosen, changed = state.first_unchanged(checkpoint, output_dir, auto=auto)
    if chosen is not None and chosen != checkpoint:
        require_same_run(chosen, trainer.resolved)
        require_same_adapters(chosen, trainer.adapters)
    startup_report.beginning(trainer.console, args, chosen, [*incomplete, *changed])
    return chosen


def resume(trainer: Trainer, checkpoint: Path) -> None:
    """Load a checkpoint into `trainer`: weights, moments, random numbers, the place in the data; all ranks call it.

    What this run was given otherwise than the one that saved is reported, a line each.
    """
    engine, console = trainer.engine.deepspeed, trainer.console
    fresh = FreshValues.of(engine)
    progress = state.load(engine, checkpoint)
    fresh.put_back(engine)
    trainer.state.global_step, trainer.state.consumed_samples = progress.step, progress.consumed_samples
    if trainer.stream is not None:
        trainer.stream.consumed = progress.consumed_samples
        trainer.state.epoch = trainer.stream.epoch
    console.say(f"resumed from {checkpoint} at step {progress.step}")
    if progress.step >= trainer.state.max_steps:
        console.say(f"all {trainer.state.max_steps} steps are done: nothing left to train")
    for line in changes(progress.hyperparameters, trainer.hyperparameters):
        console.warn(line)
    same_data = (progress.seed, progress.data) == (trainer.args.seed, trainer.data_digest)
    if trainer.train_dataset is not None and not same_data:
        console.warn(
            f"{checkpoint} was saved with another seed or other training data: "
            "the order of samples does not continue where it stopped"
        )


def hyperparameters(args: TrainingArguments, resolved: Resolved, max_steps: int) -> dict[str, Any]:
    """What decides about the steps that are still to come, under the names that a user knows."""
    config = resolved.config
    values = {} if "optimizer" in config else {name: getattr(args, name) for name in OF_ADAMW}
    values["learning_rate"] = args.learning_rate  # where the JSON has an optimizer without one, too
    if "scheduler" not in config:
        values.update(lr_scheduler_type=args.lr_scheduler_type, warmup_steps=args.warmup(max_steps))
        values.update(max_steps=max_steps)
    for section in SECTIONS:
        if section in config:
            values.update({NAMES.get(name, name): value for name, value in _flat(section, config[section])})
    values.pop("optimizer.type", None)  # another one is refused
    return values


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each value that a checkpoint was saved with and this run has otherwise."""
    lines = []
    for name in (*saved, *(name for name in now if name not in saved)):
        before, after = (_spelled(values, name) for values in (saved, now))
        if before != after:
            lines.append(f"{name}: {before} in the checkpoint, {after} in this run, which uses {after}")
    return lines if saved else []


def _spelled(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "not set"


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The single values below a section, each under its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value


def _go_on_scaling(scaler: Any, loaded: Any) -> None:
    """Take over how far `loaded` has come with the loss scale, if both find it by themselves."""
    if scaler.dynamic and loaded.dynamic:
        for name in OF_LOSS_SCALING:
            setattr(scaler, name, getattr(loaded, name))


def _advance(scheduler: Any, steps: int, train_batch: int) -> None:
    """Bring a schedule that was just built to where it stands after `steps` steps."""
    if scheduler is None or steps == 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer steps, which the checkpoint has done
        if isinstance(scheduler, LambdaLR):  # a function of the step alone
            scheduler.last_epoch, scheduler._step_count = steps - 1, steps
            scheduler.step()
        elif hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own, likewise; they count from 0
            scheduler.step(steps - 1)
        else:
            for _ in range(steps):
                # DeepSpeed gives this one the batch size for a loss
                scheduler.step(*([train_batch] if isinstance(scheduler, ReduceLROnPlateau) else []))
