"""One step of training, what is due after it, and the end."""

from __future__ import annotations

import time
from typing import Protocol

from harness.config.values.json_object import JsonObject
from harness.data.batches.stream import BatchStream, dataset_length
from harness.resilience.process.memory import peak_memory_gib
from harness.resilience.watch.activity import inside
from harness.training.best_model import load_best, note_evaluation
from harness.training.cadence import agree_on_control, due_after, step_record
from harness.training.callbacks import RunningTrainer, StepRecord, TrainerCallback, TrainerState, call
from harness.training.engine.engine import Engine
from harness.training.nonfinite import NonFinite
from harness.training.prepare import startup_report
from harness.training.prepare.run import PreparedRun
from harness.training.recording.recorder import Recorder
from harness.training.saving.checkpoints import Checkpoints


class StepTrainer(RunningTrainer, Protocol):
    """What the Trainer has for what is due after a step."""

    callbacks: list[TrainerCallback]
    checkpoints: Checkpoints
    engine: Engine
    nonfinite: NonFinite
    stream: BatchStream | None

    def evaluate(self) -> JsonObject:
        """Return the metrics of the evaluation data."""


def initial_state(run: PreparedRun) -> TrainerState:
    """Return the state of a run before its first step."""
    args, steps, env = run.args, run.plan.max_steps, run.inputs.env
    samples = 0 if run.plan.data.train is None else dataset_length(run.plan.data.train)
    return TrainerState(
        max_steps=steps,
        is_world_process_zero=env.rank == 0,
        is_local_process_zero=env.local_rank == 0,
        num_train_epochs=-(-steps * run.resolved.config["train_batch_size"] // samples) if samples else 0,
        logging_steps=args.logging_steps,
        eval_steps=args.eval_steps or args.logging_steps,
        save_steps=args.save_steps,
        train_batch_size=run.resolved.micro_batch,
    )


def one_step(run: PreparedRun, stream: BatchStream, state: TrainerState, nonfinite: NonFinite) -> StepRecord:
    """Train on the next global batch and count it in `state`; all ranks call it."""
    start_time = time.perf_counter()
    learning_rate = run.engine.learning_rate
    micro_batches = stream.next_step(read=run.engine.reads_data)
    outcome = run.engine.train_step(micro_batches, state.consumed_samples, stream.length)
    seconds = time.perf_counter() - start_time
    nonfinite.judge(state.global_step + 1, outcome, run.engine)
    units = sum(run.trainable.loss.units(inputs) for inputs, _ in micro_batches)
    state.global_step += 1
    state.consumed_samples, state.epoch = stream.consumed, stream.epoch
    memory = peak_memory_gib(run.engine.device)
    return step_record(outcome, state, learning_rate, seconds, stream.tokens(units) / seconds, memory)


def end_training(trainer: StepTrainer, stop: int) -> None:
    """Finish what training has begun, and end the process where a signal, `stop`, asks for that."""
    run, state = trainer.run, trainer.state
    trainer.checkpoints.finish()
    trainer.nonfinite.summary(state.global_step)
    if not stop:
        with inside("loading the best model"):
            load_best(run, state)
    call(trainer.callbacks, "on_train_end", trainer)
    if stop:
        newest, model_only = trainer.checkpoints.newest, run.args.save_only_model
        raise startup_report.stopped(run.console, stop, state.global_step, newest, model_only=model_only)


def after_step(trainer: StepTrainer, record: StepRecord, recorder: Recorder) -> int:
    """Do what is due after a step: callbacks, log, evaluation, checkpoint; return the signal that ends the run."""
    control, device, checkpoints = trainer.control, trainer.engine.device, trainer.checkpoints
    checkpoints.wait_a_moment()
    due = due_after(record, trainer.run, trainer.state, trainer.stream.before if trainer.stream else 0)
    call(trainer.callbacks, "on_step_end", trainer, record=record)
    for event in due.epoch_events:
        call(trainer.callbacks, event, trainer)
    if due.log:
        call(trainer.callbacks, "on_log", trainer, logs=recorder.log(record))
    stop = agree_on_control(control, device, checkpoints)
    if control.should_log and not due.log:
        call(trainer.callbacks, "on_log", trainer, logs=recorder.log(record))
    control.should_log = False
    if not stop and (control.should_evaluate or due.evaluate):
        control.should_evaluate = False
        note_evaluation(trainer.args, trainer.state, control, recorder.evaluation(trainer.evaluate))
        stop = agree_on_control(control, device, checkpoints)
    if stop or control.should_save or due.save:
        control.should_save = False
        ends = trainer.state.global_step >= trainer.state.max_steps
        checkpoints.begin(last=bool(stop) or control.should_training_stop or ends)
        stop = agree_on_control(control, device, checkpoints)
    return stop
