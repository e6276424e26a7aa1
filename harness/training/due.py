"""What the arguments ask for after a step: log, evaluation, checkpoint, the end of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

from harness.data.batches.stream import dataset_length
from harness.training.callbacks import StepRecord, TrainerState
from harness.training.run import Run


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the arguments ask for after a step; a step may reach from one epoch into the next."""

    epoch_events: tuple[str, ...]
    log: bool
    evaluate: bool
    save: bool


def due_after(record: StepRecord, run: Run, state: TrainerState, before: int) -> Due:
    """Return what is due after the step of `record`. After the last step, everything that is enabled is due.

    `before`: the samples that had been consumed before it.
    """
    args, step, last = run.args, record.step, record.step == state.max_steps
    samples = dataset_length(run.data.train)
    epoch_end = record.consumed_samples // samples > before // samples
    return Due(
        epoch_events=("on_epoch_end", "on_epoch_begin")[: 1 if last else 2] if epoch_end else (),
        log=(last and args.logging_strategy != "no")
        or _falls_due(args.logging_strategy, args.logging_steps, step, epoch_end),
        evaluate=run.data.evaluation is not None
        and args.eval_strategy != "no"
        and (last or _falls_due(args.evaluation_strategy, args.eval_steps or args.logging_steps, step, epoch_end)),
        save=args.saves
        and (
            (last and args.save_strategy != "best") or _falls_due(args.save_strategy, args.save_steps, step, epoch_end)
        ),
    )


def _falls_due(strategy: str, steps: int, step: int, epoch_end: bool) -> bool:
    return epoch_end if strategy == "epoch" else strategy == "steps" and steps > 0 and step % steps == 0
