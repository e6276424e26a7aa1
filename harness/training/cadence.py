"""What is due after a step, and whether all ranks agree on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.data.batches.stream import dataset_length
from harness.resilience.process import signals
from harness.resilience.process.distributed import largest
from harness.training.callbacks import StepRecord, TrainerControl, TrainerState
from harness.training.engine.engine import StepOutcome
from harness.training.engine.losses import AUX_LOSS
from harness.training.prepare.run import PreparedRun
from harness.training.saving.checkpoints import Checkpoints


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the arguments ask for after a step; a step may reach from one epoch into the next."""

    epoch_events: tuple[str, ...]
    log: bool
    evaluate: bool
    save: bool


def due_after(record: StepRecord, run: PreparedRun, state: TrainerState, before: int) -> Due:
    """Return what is due after the step of `record`. After the last one all is that is done at all.

    `before`: the samples that had been consumed before it.
    """
    args, step, last = run.args, record.step, record.step == state.max_steps
    samples = dataset_length(run.plan.data.train)
    epoch_end = record.consumed_samples // samples > before // samples
    return Due(
        epoch_events=("on_epoch_end", "on_epoch_begin")[: 1 if last else 2] if epoch_end else (),
        log=(last and args.logging_strategy != "no")
        or _falls_due(args.logging_strategy, args.logging_steps, step, epoch_end),
        evaluate=run.plan.data.evaluation is not None
        and args.eval_strategy != "no"
        and (last or _falls_due(args.evaluation_strategy, args.eval_steps or args.logging_steps, step, epoch_end)),
        save=args.saves
        and (
            (last and args.save_strategy != "best") or _falls_due(args.save_strategy, args.save_steps, step, epoch_end)
        ),
    )


def _falls_due(strategy: str, steps: int, step: int, epoch_end: bool) -> bool:
    return epoch_end if strategy == "epoch" else strategy == "steps" and steps > 0 and step % steps == 0


def agree_on_control(control: TrainerControl, device: torch.device, checkpoints: Checkpoints) -> int:
    """Set `control` to what is asked for on any rank, as a rank that acts alone would wait for ever; all ranks call it.

    A checkpoint that is being written advances where all ranks are ready. Returns the number of the signal that asks
    for the end, 0 if none does.
    """
    saves = control.should_save or checkpoints.is_due
    asked = (control.should_training_stop, saves, control.should_evaluate, control.should_log)
    waits, stop, *flags = largest([not checkpoints.is_ready, signals.precedence(signals.received()), *asked], device)
    control.should_training_stop, control.should_save, control.should_evaluate, control.should_log = map(bool, flags)
    if not waits and checkpoints.advance():  # callbacks were called
        return agree_on_control(control, device, checkpoints)
    return signals.of_precedence(stop)


def step_record(
    outcome: StepOutcome,
    state: TrainerState,
    learning_rate: float,
    seconds: float,
    tokens_per_second: float,
    memory_gib: tuple[float | None, float | None] = (None, None),
) -> StepRecord:
    """Return the record of the step that `state` has just counted."""
    return StepRecord(
        step=state.global_step,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        learning_rate=learning_rate,
        tokens_per_second=tokens_per_second,
        step_seconds=seconds,
        consumed_samples=state.consumed_samples,
        epoch=state.epoch,
        aux_loss=outcome.parts.get(AUX_LOSS),
        device_memory_gib=memory_gib[0],
        host_memory_gib=memory_gib[1],
        skipped=not outcome.applied,
    )
