"""The Trainer: HuggingFace's interface over DeepSpeed's engines, in any layout.

    trainer = Trainer(model="tiny-llama", args=TrainingArguments(deepspeed_config="zero3"), train_dataset=blocks)
    trainer.train()
    trainer.save_model()

Under the deepspeed launcher every process makes one Trainer; under plain `python` the only process does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import deepspeed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.batches.collate import AnyDataset, Collator, MapDataset, MicroBatch, collate
from harness.batches.evaluation import EvaluationData, by_prefix
from harness.batches.stream import BatchStream
from harness.config.values.json_object import JsonObject
from harness.console import Console, plain_console
from harness.device.memory import GIB, peak_bytes
from harness.errors import UserError, refuse_all
from harness.preconditions import establish
from harness.resilience.process import records, signals
from harness.resilience.process.activity import Phase, inside
from harness.topology.agreement import all_or_none, all_reduce_max, any_rank, broadcast_object
from harness.topology.env import LaunchEnv, records_folder
from harness.topology.processes import peak_resident_bytes
from harness.training.callbacks import (
    AnyCallback,
    MomentValues,
    StepRecord,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    instance,
    instances,
    is_default,
    keywords,
    reads_between_steps,
    take_out,
)
from harness.training.engine.engine import Engine
from harness.training.engine.losses import AUX_LOSS, LossFunction, first_tensor
from harness.training.engine.nonfinite import NonFinite
from harness.training.engine.outputs import Preprocess
from harness.training.evaluate import evaluation_data, evaluation_metrics, predict
from harness.training.parts import ModelExport, Parts, PushingCallback, RollsBack, needed
from harness.training.parts.data import AnyTokenizer, UserData
from harness.training.parts.objective import Objective
from harness.training.prepare.plan import RunInputs, plan_run
from harness.training.prepare.preparation import prepare_run, release
from harness.training.prepare.run import NOTHING_DUE
from harness.training.prepare.trainable import Model
from harness.training.recording.recorder import Recorder
from harness.training.saving.checkpoints import Checkpoints
from harness.training.saving.resume import begin_or_resume, resume_named

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from transformers.trainer_utils import EvalPrediction, PredictionOutput, TrainOutput

INTERVALS = attrgetter(
    "logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps"
)
"""Reads the arguments that decide after which steps a run logs, evaluates and saves."""


class Trainer:
    """Trains, evaluates, predicts, saves.

    Args:
        model: a preset's name or a HuggingFace directory, a config, a model in memory; or a list of layers
            (modules, LayerSpecs, functions) with `loss_fn`.
        args: the run's arguments; `args.deepspeed_config` is the DeepSpeed JSON.
        train_dataset, eval_dataset: map-style or an IterableDataset; items are dicts with input_ids (and labels), or
            with text or messages to tokenise, or pairs (inputs, labels). Pass several eval_datasets as a dict by name.
        loss_fn: `loss_fn(outputs, labels)` returns the mean over its samples; required for a list of layers. For a
            HuggingFace model it receives the logits and replaces the cross entropy (see `LogitsLoss`).
        compute_loss_func: a loss with the signature of HuggingFace's argument, for a HuggingFace model.
        processing_class: the tokenizer, saved beside the model; by default the tokenizer in the model's directory.
        data_collator: makes a micro-batch from a list of items.
        callbacks: instances or classes of TrainerCallback, called on every rank.
        compute_metrics: returns metrics for an EvalPrediction, the logits and labels of all samples; called on rank 0.
        preprocess_logits_for_metrics: maps logits and labels of a micro-batch to the values to keep.
        console: where to print; by default standard output on rank 0.
        peft_config: peft's LoraConfig, to train adapters instead of the model's weights.
        quantization_config: transformers' BitsAndBytesConfig, to hold the weights under adapters in 4 bits.
        optimizers: (optimizer, scheduler) over the parameters of a model in memory; a scheduler of None selects the
            arguments' schedule. The run builds an optimizer of the same class and groups over its own parameters.
        objective: what to train on instead of the next token, such as preferences (`harness.Preferences`).
        config: the checked DeepSpeed JSON, if the program has already read it (`read_run_config`).
        flags: flags of the program besides `args`, for `run.json`.

    Attributes:
        run: the run's config, layout, groups, model and engine.
        control: HuggingFace's TrainerControl, passed to callbacks.

    Raises:
        UserError: the user can correct the problem; raised before the model is built if possible.
    """

    parts: ClassVar[Parts] = Parts()  # empty: `harness.Trainer` has every installed part

    def __init__(
        self,
        model: Model,
        args: TrainingArguments,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | Mapping[str, AnyDataset] | None = None,
        *,
        loss_fn: LossFunction | None = None,
        processing_class: AnyTokenizer | None = None,
        data_collator: Collator | None = None,
        callbacks: Sequence[AnyCallback] | None = None,
        console: Console | None = None,
        peft_config: LoraConfig | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, object]] | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        objective: Objective | None = None,
        config: RunConfig | None = None,
        flags: Mapping[str, object] | None = None,
        **others: None,  # HuggingFace's other arguments; refused with the reason
    ) -> None:
        # Before anything else: libraries fail in obscure ways without open streams or a working directory.
        establish()
        self._require_known(others)
        env = LaunchEnv.from_environ(os.environ)
        inputs = RunInputs(
            model=model,
            console=console or plain_console(env.rank),
            env=env,
            parts=self.parts if objective is None else replace(self.parts, data=objective.data),
            objective=objective,
            data_collator=_collator(data_collator, objective),
            loss_fn=loss_fn,
            compute_loss_func=compute_loss_func,
            peft_config=peft_config,
            quantization_config=quantization_config,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            flags=flags or {},
            optimizers=optimizers,
        )
        if not processing_class and inputs.parts.data is not None:
            processing_class = inputs.parts.data.own_tokenizer(model)
        given = UserData(train_dataset=train_dataset, eval_dataset=eval_dataset, processing_class=processing_class)
        with self.parts.watch.telling_of_a_failure(env), inside("preparing"):
            own_callbacks = [self.parts.accept_callback(callback) for callback in instances(callbacks or ())]
            profiler = None
            if args.profile:
                profiler = needed(self.parts.profiling, "--profile", "harness.report")(args.profile)
            self._pushing = self._pushing_callback(args, inputs) if args.push_checkpoints_to else None
            self.run = run = prepare_run(*plan_run(args, inputs, given, config))
            self.control = TrainerControl()
            # Attached once, so that a step calls only what this run uses.
            self._reduce_max: Callable[[Sequence[int]], list[int]] = all_reduce_max if env.world_size > 1 else list
            self._is_recorded = records_folder() is not None
            self._signals: signals.SignalListener | None = None
            self._keywords: dict[object, Mapping[str, object] | None] = {}  # by method; None: does nothing
            self._weights_are_read = True  # whether a callback of any rank may look at weights after a step
            self._next_event = 0  # the next step after which something may be due; 0: after the next one
            self._intervals: object = None  # the values of INTERVALS for which it holds; a callback may change them
            self.callbacks = self._all_callbacks(own_callbacks, profiler)
            self.nonfinite = NonFinite(args.nonfinite, run.console)
            overridden = None if type(self).save_checkpoint is Trainer.save_checkpoint else self.save_checkpoint
            self.checkpoints = Checkpoints(run, self.nonfinite, partial(self._call, "on_save"), overridden)
            self._rollback: RollsBack | None = None
            if args.nonfinite == "rollback":
                self._rollback = needed(self.parts.rollback, "--nonfinite rollback", "harness.extras")(run)
            begin_or_resume(run)
            self.checkpoints.resumed(run.checkpoint)
            self._call("on_init_end")

    def _pushing_callback(self, args: TrainingArguments, inputs: RunInputs) -> PushingCallback:
        push = needed(self.parts.pushing, "--push_checkpoints_to", "harness.extras")
        callback = push(args, inputs.env, inputs.console)
        if args.resume_from_checkpoint is not None:
            # Before the run looks for its checkpoint: a new host may have none on its disk.
            callback.read_back(args.resume_from_checkpoint)
        return callback

    def _all_callbacks(self, own: Sequence[TrainerCallback], profiler: TrainerCallback | None) -> list[TrainerCallback]:
        """Return the callbacks of the run in the order in which they are called."""
        show = self.parts.progress
        stop_early = self.parts.early_stopping
        patience = self.run.spec.args.early_stopping_patience
        callbacks = [
            None if show is None else show(self.run.console, self.run.trainable.speed_unit),
            *own,
            stop_early(patience) if patience and stop_early is not None else None,
            profiler,
            self._pushing,
        ]
        return [callback for callback in callbacks if callback is not None]

    def _require_known(self, others: Mapping[str, object]) -> None:
        refuse_all([f"Trainer takes no {name}: leave it out" for name in others])

    def close(self) -> None:
        """Free the engine's memory and close its process groups, so that another Trainer can be made."""
        self.checkpoints.settle()
        if self.stream is not None:
            self.stream.close()
        # They refer to the engine.
        self._keywords.clear()
        release(self.run)

    @inside("training", Phase.STEP)
    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train to the last step; return that step, the mean loss of this call's steps, and the speed.

        Args:
            resume_from_checkpoint: a checkpoint's path, or True for the newest whole one in `output_dir`.

        Raises:
            signals.Stopped: a SystemExit, on all ranks, after the current step and a checkpoint, if any rank gets
                SIGTERM, SIGINT, SIGUSR1 or SIGHUP.
            UserError: without training data; or with `--nonfinite stop`, if a step is not finite.
        """
        from transformers.trainer_utils import TrainOutput

        if self.stream is None:
            raise UserError("train() needs a train_dataset")
        if resume_from_checkpoint:
            with inside("resuming"):
                if self._pushing is not None:
                    all_or_none(partial(self._pushing.read_back, resume_from_checkpoint))
                resume_named(self.run, resume_from_checkpoint)
            self.checkpoints.resumed(self.run.checkpoint)
        self.checkpoints.require_own_directory()
        run = self.run
        state = run.state
        stop = 0
        first_step = state.global_step
        start_time = time.perf_counter()
        self.control.should_training_stop = False
        if first_step >= state.max_steps:
            run.console.warn(
                f"train(): all {first_step} steps are done, so nothing is trained: to continue, make a Trainer "
                "with a larger max_steps and resume_from_checkpoint; to start again, one with another output_dir"
            )
        rebalancer = None
        if run.spec.args.rebalance_steps:
            rebalancer = needed(self.parts.rebalancer, "--rebalance_steps", "harness.extras")(run)
        is_ours = getattr(self.training_step, "__func__", None) is Trainer.training_step
        # A user's override may read the weights after calling `training_step`, which waits until all have arrived.
        step = self._training_step if is_ours else self.training_step
        deferred = signals.at_the_end_of_a_step(run.console.say, run.spec.inputs.env.parent)
        with deferred as self._signals, Recorder(run) as recorder, self.checkpoints:
            guarded: Callable[[], AbstractContextManager[None]] = nullcontext
            if self._rollback is not None:
                guarded = partial(self._rollback.guarding, recorder.rewind, self._finish_save)
            self._next_event = 0
            self._call("on_train_begin")
            self._call("on_epoch_begin")
            if self._rollback is not None:
                self._rollback.begin(self.save_checkpoint)
            # For the requests of callbacks. A signal is not acted on here: it ends the run after its first step.
            self._agree_on_control()
            # A run that a signal ended has saved this step before its evaluation.
            if run.evaluation_due and self.eval_dataset is not None:
                stop = self._evaluate_and_save(recorder, evaluate=True)
            while self._goes_on(stop):
                with guarded():
                    record = step()
                    recorder.step(record)
                    stop = self._after_step(record, recorder)
                    if rebalancer is not None and self._goes_on(stop):
                        # They refer to the engine, and would keep its memory if it is replaced.
                        self._keywords.clear()
                        if rebalancer.after_step(record):
                            recorder.describe()
            steps = state.global_step - first_step
            seconds = time.perf_counter() - start_time
            loss = recorder.mean_loss
            metrics = {
                "train_runtime": seconds,
                "train_samples_per_second": steps * run.spec.resolved.train_batch / seconds,
                "train_steps_per_second": steps / seconds,
                "train_loss": loss,
                "epoch": state.epoch,
            }
            self._end_training(stop, metrics)
        if run.spec.resolved.config.get("comms_logger", {}).get("enabled", False):
            # DeepSpeed only collects the log, and leaves printing to the program.
            deepspeed.comm.log_summary()
        return TrainOutput(state.global_step, loss, metrics)

    def _goes_on(self, stop: int) -> bool:
        """Whether another step follows; `stop` is the signal that ends the run, or 0."""
        state = self.run.state
        return not (stop or self.control.should_training_stop) and state.global_step < state.max_steps

    def _warn_without_labels(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Warn of a step whose loss is 0 because its global batch has no label; all ranks call it."""
        loss = self.run.trainable.loss
        if not any_rank(any(loss.count(labels, len(first_tensor(labels))) for _, labels in micro_batches)):
            self.run.console.warn(
                f"step {self.state.global_step}: the global batch has no label in the loss, so its loss is 0; the "
                "optimizer still moves the weights, by momentum and weight decay"
            )

    @inside("training", Phase.STEP)
    def training_step(self) -> StepRecord:
        """Train on the next global batch; the same code in every layout. All ranks call it."""
        record = self._training_step()
        self.run.engine.settle()
        return record

    def _training_step(self) -> StepRecord:
        """Train on the next global batch. Its new weights may still be in flight afterwards (`Engine.settle`)."""
        run = self.run
        state = run.state
        stream = run.stream
        assert stream is not None
        records.THIS_RANK.step = state.global_step + 1
        if self._is_recorded:
            # A rank that is killed in the step cannot report it afterwards.
            records.record_step()
        self._call("on_step_begin")
        start_time = time.perf_counter()
        # Read before the update, which advances the schedule.
        learning_rate = run.engine.learning_rate
        # This data-parallel rank's own. Only the first stage needs inputs and only the last needs labels: the stages
        # between get an empty list.
        micro_batches = stream.next_step(read=run.engine.reads_data)
        outcome = run.engine.train_step(
            micro_batches, state.consumed_samples, stream.length, stream.sources, settles=False
        )
        # Up to the moment when the gradient norm is known: on a GPU the update may still be queued.
        seconds = time.perf_counter() - start_time
        if not (isfinite(outcome.loss) and outcome.finite_gradient):
            # Before the step is counted: `stop` and `rollback` raise, and then it must not have happened.
            self.nonfinite.judge(state.global_step + 1, outcome, run.engine)
        state.global_step += 1
        # The loss is the same on all ranks, so all of them or none go into this collective.
        if outcome.loss == 0.0:
            self._warn_without_labels(micro_batches)
        state.consumed_samples = stream.consumed
        state.epoch = stream.epoch
        units = 0
        for inputs, _ in micro_batches:
            units += run.trainable.loss.units(inputs)
        on_device = run.groups.device.type != "cpu"
        peaks = [
            max(run.earlier_peaks.device, peak_bytes(run.groups.device)) if on_device else 0,
            max(run.earlier_peaks.host, peak_resident_bytes()),
        ]
        # The peak of the rank that needs most.
        device_bytes, host_bytes = self._reduce_max(peaks)
        # A callback may read weights on one rank only. Settling is collective, so all ranks settle here.
        if self._weights_are_read:
            run.engine.settle()
        sources = run.engine.sources
        return StepRecord(
            step=state.global_step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=stream.tokens(units) / seconds,
            step_seconds=seconds,
            consumed_samples=state.consumed_samples,
            epoch=state.epoch,
            aux_loss=outcome.parts.get(AUX_LOSS),
            source_losses={} if sources is None else sources.means(outcome.parts),
            metrics=run.trainable.loss.metrics(outcome.parts),
            device_memory_gib=device_bytes / GIB if on_device else None,
            host_memory_gib=host_bytes / GIB,
            skipped=not outcome.applied,
        )

    def _after_step(self, record: StepRecord, recorder: Recorder) -> int:
        """Run the callbacks, logging, evaluation and checkpoint that are due after a step.

        Returns:
            The number of the signal that ends the run, or 0.
        """
        control = self.control
        run = self.run
        stream = run.stream
        assert stream is not None
        if self.checkpoints.pending is not None:
            # All ranks wait together for the disk, so that a killed run with short steps repeats few of them.
            self.checkpoints.wait_a_moment()
        due = NOTHING_DUE
        last_step = run.state.max_steps
        epoch_ends = stream.consumed // stream.n > stream.before // stream.n
        # A callback may change the intervals, so the next event holds only while they stay the same.
        intervals = INTERVALS(run.spec.args)
        if epoch_ends or record.step >= min(self._next_event, last_step) or intervals != self._intervals:
            due = run.events_after(record.step, epoch_ends=epoch_ends, max_steps=last_step)
            self._next_event = run.next_event(record.step)
            self._intervals = intervals
        self._call("on_step_end", record=record)
        for event in due.epoch_events:
            self._call(event)
        if due.log:
            self._call("on_log", logs=recorder.log(record))
        stop = self._agree_on_control()
        if control.should_log and not due.log:
            self._call("on_log", logs=recorder.log(record))
            # `on_log` may have changed `control` on some ranks.
            stop = self._agree_on_control()
        control.should_log = False
        if stop or due.evaluate or due.save or control.should_evaluate or control.should_save:
            return self._evaluate_and_save(recorder, stop, evaluate=due.evaluate, save=due.save)
        run.evaluation_due = False
        return stop

    def _evaluate_and_save(self, recorder: Recorder, stop: int = 0, *, evaluate: bool, save: bool = False) -> int:
        """Evaluate and save if due or requested; the argument and the result are signals that end the run."""
        control = self.control
        # Evaluate before saving: a best evaluation asks for a checkpoint of this step.
        self.run.evaluation_due = evaluate or control.should_evaluate
        # After a signal only the checkpoint is written, which says that the resumed run must evaluate first.
        if self.run.evaluation_due and not stop:
            control.should_evaluate = False
            with self.checkpoints.saving_before_an_error():
                # Rank 0's metrics decide: a user's score may differ between ranks, which would load different models.
                metrics = broadcast_object(recorder.evaluation(self.evaluate))
            # A signal has interrupted the evaluation: the resumed run must repeat it.
            self.run.evaluation_due = metrics is None
            if self.parts.best_model is not None and metrics is not None:
                self.parts.best_model.note_evaluation(self.args, self.state, control, metrics)
            stop = self._agree_on_control()
        if stop or control.should_save or save:
            control.should_save = False
            ends = self.state.global_step >= self.state.max_steps
            self.checkpoints.begin(last=bool(stop) or control.should_training_stop or ends)
            stop = self._agree_on_control()
        return stop

    def _finish_save(self) -> None:
        """Complete the pending save before the run rolls back to it; all ranks call it."""
        # The run goes back to an earlier step, whose events come before `_next_event`.
        self._next_event = 0
        self.checkpoints.finish()
        self._agree_on_control()

    def _agree_on_control(self) -> int:
        """Set `control` on all ranks to the union of all ranks' requests: a rank that acts alone would hang.

        All ranks call it after callbacks, before they read `control`. A pending checkpoint advances to its next phase
        if all ranks are ready.

        Returns:
            The number of the signal that ends the run, or 0.
        """
        control = self.control
        checkpoints = self.checkpoints
        # A maximum over ranks is an "or" of the switches, and of signals picks the one of highest precedence.
        received = 0 if self._signals is None else self._signals.first
        own = [
            checkpoints.pending is None or not checkpoints.is_ready,
            received and signals.precedence(received),
            control.should_training_stop,
            control.should_save or (self.run.spec.args.save_seconds is not None and checkpoints.is_due),
            control.should_evaluate,
            control.should_log,
            any(map(reads_between_steps, map(type, self.callbacks))),
        ]
        # One small all-reduce for everything.
        waits, stop, ends, saves, evaluates, logs, reads = self._reduce_max(own)
        self._weights_are_read = bool(reads)
        control.should_training_stop = bool(ends)
        control.should_save = bool(saves)
        control.should_evaluate = bool(evaluates)
        control.should_log = bool(logs)
        # `advance` may have called on_save, in which a callback may have set `control` on some ranks.
        if not waits and checkpoints.advance():
            return self._agree_on_control()
        return stop and signals.of_precedence(stop)

    def _end_training(self, stop: int, metrics: Mapping[str, object]) -> None:
        """Complete saves, load the best model, call on_train_end. Raises Stopped if signal `stop` ended the run."""
        self.run.engine.settle()
        self.checkpoints.finish()
        self.nonfinite.summary(self.state.global_step)
        # As in HuggingFace, before `on_train_end`, in which a callback may export the model.
        if not stop:
            if self.parts.best_model is not None:
                with inside("loading the best model"):
                    self.parts.best_model.load_best(self.args, self.state, self.run.engine_state.load, self.run.console)
            self.log(metrics)
        self._call("on_train_end")
        if stop:
            raise self.checkpoints.stopped(stop)

    @inside("evaluating")
    def evaluate(
        self,
        eval_dataset: AnyDataset | Mapping[str, AnyDataset] | str | None = None,
        ignore_keys: Sequence[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "eval",
    ) -> JsonObject:
        """Evaluate each sample once, log and return the metrics; all ranks call it.

        The metrics are eval_loss, perplexity, eval_samples, the speed, and the results of `compute_metrics`.

        Args:
            eval_dataset: replaces the Trainer's: a data set, a dict of them (metrics then begin with eval_NAME), or the
                name of one of the Trainer's data sets.
            ignore_keys: has no effect, as only the logits of a model's outputs are read.
            metric_key_prefix: replaces `eval` in the names.

        Raises:
            signals.Interrupted: on all ranks, if a signal asks any of them to end training.
            UserError: no data is given, or it cannot be used.
        """
        data = evaluation_data(self.run, None if isinstance(eval_dataset, str) else eval_dataset)
        if isinstance(eval_dataset, str):
            if not (isinstance(data, Mapping) and eval_dataset in data):
                raise UserError(f"evaluate({eval_dataset!r}): eval_dataset has no data set of that name")
            data = data[eval_dataset]
        if isinstance(data, Mapping | None) and not data:
            raise UserError("evaluate() needs an eval_dataset")
        found: JsonObject = {}
        for prefix, each in by_prefix(data, metric_key_prefix).items():
            metrics = evaluation_metrics(self.run, each, prefix)
            self.nonfinite.judge_evaluation(metrics[f"{prefix}_loss"])
            self._call("on_evaluate", metrics=metrics)
            found |= metrics
        self.log(found)
        return found

    @inside("predicting")
    def predict(
        self,
        test_dataset: AnyDataset,
        ignore_keys: Sequence[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return logits (or what preprocess_logits_for_metrics keeps), label_ids and metrics; all ranks call it.

        The result is the same on every rank. `ignore_keys` has no effect, as only the logits of outputs are read.
        """
        found = predict(self.run, test_dataset, metric_key_prefix)
        self._call("on_predict", metrics=found.metrics or {})
        return found

    def log(self, logs: Mapping[str, object], start_time: float | None = None) -> None:  # noqa: ARG002
        """Add `logs`, with step and epoch, to `state.log_history`, and call `on_log`; all ranks call it.

        `start_time` has no effect: `logs` already has speeds.
        """
        logs = {**logs, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(logs)
        self._call("on_log", logs=logs)

    def _call(self, moment: str, state: TrainerState | None = None, **kwargs: Unpack[MomentValues]) -> None:
        """Call the method `moment` of every callback that has one of its own, in order.

        `state` replaces the run's state for an event that is reported late, such as the end of a background save.
        """
        # Over a copy, as a callback may remove itself.
        for callback in tuple(self.callbacks):
            method = getattr(callback, moment)
            function = getattr(method, "__func__", method)
            if function not in self._keywords:
                self._keywords[function] = None if is_default(function) else keywords(function, self)
            if (given := self._keywords[function]) is not None:
                # A callback may evaluate, which a signal interrupts: `_agree_on_control` then ends the run.
                with suppress(signals.Interrupted), inside(moment):
                    if getattr(callback, "reads_weights", True):
                        self.run.engine.settle()
                    method(self.run.spec.args, state or self.run.state, self.control, **given, **kwargs)

    def add_callback(self, callback: AnyCallback) -> None:
        """Add a callback. Raises UserError if it is not a TrainerCallback."""
        self.callbacks.append(self.parts.accept_callback(instance(callback)))

    def pop_callback(self, callback: AnyCallback) -> TrainerCallback | None:
        """Remove and return a callback, or the first one of a class. Returns None if no callback matches."""
        return take_out(self.callbacks, callback)

    remove_callback = pop_callback

    @property
    def compute_metrics(self) -> Callable[[EvalPrediction], Mapping[str, object]] | None:
        return self.run.spec.inputs.compute_metrics

    @inside("saving")
    def save_checkpoint(self) -> Path:
        """Write `output_dir/checkpoint-STEP` and wait for it; all ranks call it. Raises NotSaved (a UserError)."""
        return self.checkpoints.save()

    @inside("exporting")
    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the model as a HuggingFace directory (adapters as peft's, a list of layers as safetensors).

        All ranks call it. Raises UserError if it cannot be written, or if weights are not finite.
        """
        export = self._export()
        directory = Path(output_dir or self.args.output_dir)
        if output_dir is None:
            self.checkpoints.require_own_directory()
        self.checkpoints.finish()
        self.nonfinite.judge_weights(self.engine, str(directory))
        export.write(directory)
        if self._pushing is not None and output_dir is None:
            self._pushing.copy_model(directory)
        return directory

    @inside("gathering the model")
    def trained_model(self) -> PreTrainedModel | None:
        """Return the whole model on the CPU of rank 0, None elsewhere; all ranks call it.

        A model that was given in memory is filled and returned. Raises UserError for adapters or a list of layers.
        """
        return self._export().gather()

    def _export(self) -> ModelExport:
        if self.parts.exporting is None:
            raise UserError("the model cannot be exported without harness.extras, which is not installed")
        return self.parts.exporting(self.run)

    @property
    def args(self) -> TrainingArguments:
        return self.run.spec.args

    @property
    def state(self) -> TrainerState:
        """Counters, best evaluation and log history, passed to callbacks."""
        return self.run.state

    @property
    def console(self) -> Console:
        """Where the run prints."""
        return self.run.console

    @property
    def stream(self) -> BatchStream | None:
        """This rank's training samples; None without training data."""
        return self.run.stream

    @property
    def train_dataset(self) -> MapDataset | None:
        """The training data as tokens."""
        return self.run.data.train

    @property
    def eval_dataset(self) -> EvaluationData:
        """The evaluation data as tokens: one data set, a dict by name, or None; a new value is checked when used."""
        return self.run.data.evaluation

    @eval_dataset.setter
    def eval_dataset(self, data: EvaluationData) -> None:
        self.run.set_evaluation(data, is_new=True)

    @property
    def processing_class(self) -> AnyTokenizer | None:
        return self.run.data.tokenizer

    @property
    def model(self) -> Any:
        """This rank's layers, and the config; `trained_model()` gathers the whole model."""
        module: Any = self.run.module
        if self.run.trainable.causal is not None:
            module.config = self.run.trainable.causal.source.config
        return module

    @property
    def data_collator(self) -> Collator:
        return self.run.spec.inputs.data_collator

    @property
    def engine(self) -> Engine:
        """The current engine; rebalancing the stages replaces it."""
        return self.run.engine


def _collator(given: Collator | None, objective: Objective | None) -> Collator:
    if objective is None:
        return given or collate
    if given is not None:
        raise UserError(f"data_collator has no effect with {objective.name}, which makes its own batches: remove it")
    return objective.collate
