"""Save the checkpoints of a run, one at a time, in the background of its steps.

If a save is due while another is being written, it waits for that one; a save by `--save_seconds` is postponed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.batches.order import OwnOrder
from harness.checkpoint.background_save import BackgroundSave, Target, Writer
from harness.checkpoint.directories import TrainingProgress, finished_name, numbered, set_aside_foreign
from harness.checkpoint.integrity import require_unused
from harness.checkpoint.tensors.not_saved import NotSaved
from harness.config.values.json_object import JsonObject
from harness.device.process_group import all_arrive
from harness.errors import UserError
from harness.resilience.process import signals
from harness.resilience.process.activity import inside
from harness.topology.agreement import all_or_none, any_rank
from harness.training.engine.nonfinite import NonFinite
from harness.training.prepare.run import Run
from harness.training.saving.resume import hyperparameters

MOMENT_S = 1.0  # how long the step after a save waits for the disk
PATIENCE_S = 5.0  # how long to wait for other ranks that may never come


class Checkpoints:
    """Saves a run's checkpoints; all ranks call its methods in the same order.

    Attributes:
        pending: the checkpoint that is being written, or None.
        newest: step of the newest complete checkpoint that this run has saved or resumed, or None.
    """

    def __init__(
        self, run: Run, nonfinite: NonFinite, on_save: Callable[..., None], overridden: Callable[[], Path] | None = None
    ) -> None:
        """Save nothing yet. `overridden` is a Trainer subclass's `save_checkpoint`, called instead of ours."""
        self.run = run
        self._nonfinite = nonfinite
        self._on_save = on_save
        self._overridden = overridden
        self._writer = Writer()
        self.pending: BackgroundSave | None = None
        self._best: float | None = None  # metric of the step that is being saved, if it is the best so far
        self._begun = time.monotonic()  # when the last save began
        self._saved = run.state  # the state when the newest save began
        # Step and consumed samples of the newest save. After a rollback the same step comes again, with other samples.
        self._state_of: tuple[int, int] | None = None
        args = run.spec.args
        self._owns_directory = args.resume_from_checkpoint is not None and not args.overwrite_output_dir
        self.newest: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Usually all ranks raise a UserError together, so they can still complete the pending checkpoint.
        if isinstance(error, UserError):
            self.settle()

    def resumed(self, checkpoint: Path | None) -> None:
        """Record that the run has resumed a checkpoint, unless it lies in another output directory."""
        if checkpoint is not None and checkpoint.resolve().parent == self.run.spec.output_dir.resolve():
            self.newest = self.run.state.global_step
            self._owns_directory = True

    def require_own_directory(self) -> None:
        """Raise UserError on all ranks if `output_dir` holds another run that this one may not overwrite."""
        if not self._owns_directory:
            overwrites = self.run.spec.args.overwrite_output_dir
            all_or_none(self._set_aside if overwrites else partial(require_unused, self.run.spec.output_dir))
            self._owns_directory = True

    def _set_aside(self) -> None:
        """Rename the checkpoints of an earlier run, so that none of them counts as this run's."""
        if self.run.state.is_world_process_zero:
            for path, moved in set_aside_foreign([path for _, path in numbered(self.run.spec.output_dir)]):
                self.run.console.warn(f"{path} belongs to an earlier run: it is now {moved}")

    @property
    def is_ready(self) -> bool:
        """Whether this rank has finished its phase of the pending checkpoint."""
        return self.pending is not None and not self.pending.is_busy

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due by rank 0's clock (`--save_seconds`)."""
        seconds = self.run.spec.args.save_seconds if self.run.spec.args.saves else None
        # Clocks differ between hosts, so rank 0's decides; `_agree_on_control` tells the others.
        if seconds is None or self.pending is not None or not self.run.state.is_world_process_zero:
            return False
        return time.monotonic() - self._begun >= seconds

    @inside("saving")
    def begin(self, *, last: bool = False) -> None:
        """Begin to save the current state, unless begun already; warn if it fails. A run's `last` save is awaited."""
        if self._state_of != (self.run.state.global_step, self.run.state.consumed_samples):
            self.finish()
            # The last save needs no copy of the weights in memory: no step changes them while it is written.
            self._attempt(self._overridden or partial(self._begin, copy=not last))
            if last:
                self.finish()

    @contextmanager
    def saving_before_an_error(self) -> Iterator[None]:
        """Save the current state if the block raises an error on all ranks, which is about to end the run."""
        try:
            yield
        except Exception:
            # Saving is collective. If the error is on some ranks only, the others never arrive, and nothing is saved.
            barrier = f"save of {self.run.run_id} before an error at step {self.run.state.global_step}"
            if self.run.spec.args.saves and all_arrive(barrier, PATIENCE_S):
                self.begin(last=True)
            raise

    @inside("saving")
    def advance(self) -> bool:
        """Start the next phase; all ranks call it when all are ready. Returns whether a checkpoint is now complete."""
        return bool(self._attempt(self._advance))

    def wait_a_moment(self) -> None:
        """Wait up to a second for the checkpoint, in the step after its save; all ranks call it."""
        # This way a killed run with short steps repeats at most the steps between two saves.
        until = time.monotonic() + MOMENT_S
        # The condition is the same on all ranks, so all of them or none enter `any_rank`.
        while self.pending is not None and self.pending.step == self.run.state.global_step - 1:
            self.pending.wait(until - time.monotonic())
            if any_rank(self.pending.is_busy):
                return
            self.advance()

    @inside("saving")
    def finish(self) -> None:
        """Wait for the pending checkpoint and the deletion of older ones; warn if it fails."""
        while self.pending is not None:
            self.advance()
        self._writer.wait()

    def save(self) -> Path:
        """Save the current state and wait until the checkpoint is complete. Raises NotSaved if it fails."""
        self.finish()
        # Nobody trains while this waits.
        pending = self._begin(copy=False)
        try:
            while not self._advance():
                pass
        except NotSaved:
            self._lost(pending.step)
            raise
        return pending.path

    def settle(self) -> None:
        """Wait as `finish` does, but give up after PATIENCE_S if some ranks do not call it."""
        if self.pending is not None and all_arrive(f"save {self.pending.number}", PATIENCE_S):
            self.finish()

    def stopped(self, number: int) -> signals.Stopped:
        """Report that signal `number` ended the run, and where it can be resumed; return the exception to raise."""
        step = self.run.state.global_step
        saved = self.newest
        console = self.run.console
        name = signal.Signals(number).name
        resumes = 'resume_from_checkpoint "auto" resumes'
        if self.run.spec.args.save_only_model:
            kept = "no model was saved" if saved is None else f"the model of step {saved} is saved"
            console.say(
                f"{name}: stopped after step {step}; {kept}, but no run can continue from it (--save_only_model)"
            )
        elif saved == step:
            console.say(f"{name}: saved and stopped after step {step}; {resumes}")
        else:
            rest = "there is no checkpoint" if saved is None else f"{resumes} at step {saved}"
            console.warn(f"{name}: stopped after step {step}, which could not be saved; {rest}")
        return signals.Stopped(number)

    def _begin(self, *, copy: bool) -> BackgroundSave:
        step = self.run.state.global_step
        # From the start of a save to the start of the next: `--save_seconds` bounds the work that a crash can lose.
        self._begun = time.monotonic()
        self.require_own_directory()
        self._nonfinite.judge_weights(self.run.engine, finished_name(step))
        self._best = self.run.state.best_metric if self.run.state.best_global_step == step else None
        self.pending = begin_checkpoint(self.run, self._writer, copy=copy)
        self._state_of = step, self.run.state.consumed_samples
        # A copy, as `on_save` is called when training may be some steps ahead.
        self._saved = replace(self.run.state)
        return self.pending

    def _advance(self) -> bool:
        pending = self.pending
        # So that nothing is pending if `advance` raises NotSaved.
        self.pending = None
        if pending is None:
            return False
        if not pending.advance():
            self.pending = pending
            return False
        self.newest = pending.step
        # Only now: an unfinished checkpoint must not be named as the best model.
        if self._best is not None:
            self.run.state.best_model_checkpoint = str(pending.path)
            self.run.state.best_saved_metric = self._best
        saved = replace(self._saved, best_model_checkpoint=self.run.state.best_model_checkpoint)
        self._on_save(saved, checkpoint=pending.path)
        return True

    def _attempt(self, action: Callable[[], object]) -> object:
        step = self.run.state.global_step if self.pending is None else self.pending.step
        try:
            return action()
        except NotSaved as error:
            self._lost(step)
            self.run.console.warn(f"no checkpoint of step {step}: {error}; training continues")
            return None

    def _lost(self, step: int) -> None:
        """Record that a step could not be saved: it may be tried again, and does not count as the best."""
        self._state_of = None
        best_model = self.run.spec.parts.best_model
        if best_model is not None and step == self.run.state.best_global_step:
            best_model.forget_unsaved(self.run.spec.args, self.run.state)


def begin_checkpoint(run: Run, writer: Writer, *, copy: bool) -> BackgroundSave:
    """Begin to write the state of a run to `output_dir/checkpoint-STEP`; all ranks call it.

    With `copy`, the checkpoint is written from a copy in memory, so that training may continue. `from_pretrained` of
    HuggingFace can read its weights, and that of peft its adapters. Raises NotSaved if it fails.
    """
    export = run.spec.parts.exporting
    target = Target(
        output_dir=run.spec.output_dir,
        keep=run.spec.args.save_total_limit,
        # Never deleted, even if it is beyond the limit.
        best=_best(run),
        model_only=run.spec.args.save_only_model,
        write_others=lambda folder: export(run).write_configs(folder) if export is not None else None,
    )
    return BackgroundSave(run.engine_state, target, progress_of(run), writer, copy=copy)


def _best(run: Run) -> Path | None:
    """Return the path of the best evaluation's checkpoint, which may be about to be written."""
    state = run.state
    if state.best_global_step == state.global_step:
        return run.spec.output_dir / finished_name(state.global_step)
    return None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)


def progress_of(run: Run) -> TrainingProgress:
    """Return the content of `state.json`, except the engine's counters."""
    state = run.state
    best_model = run.spec.parts.best_model
    return TrainingProgress(
        step=state.global_step,
        consumed_samples=state.consumed_samples,
        layout=str(run.spec.layout),
        zero_stage=run.spec.resolved.zero_stage,
        precision=run.spec.resolved.precision,
        seed=run.spec.args.order_seed,
        data=run.spec.data_digest,
        adapters=run.spec.adapter_fingerprint,
        objective=run.spec.inputs.objective_settings,
        base=run.base_checksums,
        model=run.trainable.summary,
        model_config=run.trainable.shaping_config,
        optimizer=run.spec.optimizer_name,
        hyperparameters=hyperparameters(run.spec.args, run.spec.resolved, run.spec.max_steps, run.spec.user_optimizer),
        skipped_samples=list(state.skipped_samples),
        run_id=run.run_id,
        best={} if best_model is None else best_model.best_as_saved(run.spec.args, state),
        stream=stream_position(run, state.consumed_samples),
        evaluation_due=run.evaluation_due,
    )


def stream_position(run: Run, consumed: int) -> JsonObject:
    """Return the position in training data with its own order; {} except on rank 0, which writes `state.json`."""
    data = run.data.train
    return data.position(consumed) if isinstance(data, OwnOrder) and run.groups.rank == 0 else {}
