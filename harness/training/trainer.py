"""The Trainer: shaped like HuggingFace's, over DeepSpeed's engines, in any layout.

    trainer = Trainer(model="tiny-llama", args=TrainingArguments(deepspeed_config="zero3"), train_dataset=blocks)
    trainer.train()
    trainer.save_model()

Started by the deepspeed launcher every process makes one; started by plain `python` it is alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Unpack

import deepspeed
from transformers import PreTrainedModel

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.config.values.json_object import JsonObject
from harness.console import Console, plain_console
from harness.data.batches.collate import AnyDataset, Collator, collate
from harness.data.batches.evaluation import by_prefix
from harness.data.inputs.datasets import own_tokenizer
from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.resilience.process import records, signals
from harness.resilience.process.activity import Phase, inside
from harness.resilience.process.memory import peak_memory_gib
from harness.topology.agreement import largest
from harness.topology.env import LaunchEnv
from harness.training.best_model import EarlyStoppingCallback, load_best, note_evaluation, own_early_stopping
from harness.training.callbacks import (
    AnyCallback,
    MomentValues,
    StepRecord,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    instance,
    instances,
    keywords,
    take_out,
)
from harness.training.engine.engine import Engine
from harness.training.engine.losses import AUX_LOSS, LossFunction
from harness.training.engine.outputs import Preprocess
from harness.training.evaluate import evaluation_metrics, predict
from harness.training.huggingface import missing, require_ours
from harness.training.nonfinite import NonFinite
from harness.training.prepare.plan import RunInputs
from harness.training.prepare.preparation import prepare_run, release, training_stream
from harness.training.prepare.trainable import Model
from harness.training.rebalancing import Rebalancer
from harness.training.recording.profiler import ProfileCallback
from harness.training.recording.progress import ProgressCallback
from harness.training.recording.recorder import Recorder
from harness.training.saving.checkpoints import Checkpoints
from harness.training.saving.model import gather_model, write_model
from harness.training.saving.resume import Rollback, begin_or_resume, resume_named
from harness.training.script_methods import ScriptMethods
from harness.uncaught import show_in_one_line

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers.trainer_utils import EvalPrediction, PredictionOutput, TrainOutput


class Trainer(ScriptMethods):
    """Trains, evaluates, predicts, saves.

    Args:
        model: a preset's name or a HuggingFace directory, a config, a model in memory; or a list of layers
            (modules, LayerSpecs, functions) with `loss_fn`.
        args: the arguments; `args.deepspeed_config` is the DeepSpeed JSON.
        train_dataset, eval_dataset: map-style or an IterableDataset; items are dicts with input_ids (and labels), or
            with text or messages to be tokenised, or pairs (inputs, labels). Several eval_datasets by name: a dict.
        loss_fn: `loss_fn(outputs, labels)`, the mean over the samples it is given: needed for a list of layers; of a
            HuggingFace model it takes the logits, in the place of the cross entropy (see `LogitsLoss`).
        compute_loss_func: the same of a HuggingFace model with HuggingFace's signature.
        processing_class: the tokenizer, saved beside the model; by default the one in the model's directory.
        data_collator: makes a micro-batch of a list of items.
        callbacks: called at the usual moments, on every rank; instances or classes.
        compute_metrics: makes metrics of an EvalPrediction, the logits and labels of all samples; called on rank 0.
        preprocess_logits_for_metrics: of logits and labels of a micro-batch, makes what is kept of the logits.
        console: where to print; by default standard output on rank 0.
        peft_config: peft's LoraConfig, to train adapters in the place of the model's weights.
        config: the DeepSpeed JSON, where the program has read and checked it already (`read_run_config`).
        flags: what the program was started with besides `args`, for `run.json`.

    Attributes:
        run: all that is known of the run: config, layout, groups, model, engine.
        state, control: as HuggingFace's, given to callbacks.
        stream: the training samples of this rank; None without training data.

    Raises:
        UserError: what the user can correct, before a model is built wherever that is possible.
    """

    def __init__(
        self,
        model: Model,
        args: TrainingArguments,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | Mapping[str, AnyDataset] | None = None,
        *,
        loss_fn: LossFunction | None = None,
        processing_class: Tokenizer | None = None,
        data_collator: Collator = collate,
        callbacks: Sequence[AnyCallback] = (),
        console: Console | None = None,
        peft_config: LoraConfig | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, object]] | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        config: RunConfig | None = None,
        flags: Mapping[str, object] | None = None,
        **others: object,
    ) -> None:
        show_in_one_line()
        require_ours(type(self), Trainer, others)
        env = LaunchEnv.from_environ(os.environ)
        inputs = RunInputs(
            model=model,
            args=args,
            console=console or plain_console(env.rank),
            env=env,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            loss_fn=loss_fn,
            compute_loss_func=compute_loss_func,
            peft_config=peft_config,
            processing_class=processing_class or own_tokenizer(model),
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            config=config,
            flags=flags or {},
        )
        with inside("preparing"):
            given = instances(callbacks)
            self.run = run = prepare_run(inputs)
            self.args = run.args
            self.train_dataset = run.data.train
            self.eval_dataset = run.data.evaluation
            self.processing_class: Tokenizer | None = run.data.tokenizer
            self.control = TrainerControl()
            self.state = run.initial_state()
            self.callbacks: list[TrainerCallback] = [ProgressCallback(run.console, run.trainable.speed_unit)]
            self.callbacks += map(own_early_stopping, given)
            if args.early_stopping_patience:
                self.callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
            if args.profile:
                self.callbacks.append(ProfileCallback(args.profile))
            self.nonfinite = NonFinite(args.nonfinite, run.console)
            overridden = None if type(self).save_checkpoint is Trainer.save_checkpoint else self.save_checkpoint
            self.checkpoints = Checkpoints(run, self.state, self.nonfinite, partial(self._call, "on_save"), overridden)
            self.stream = training_stream(run)
            self.rollback = Rollback(run, self.state, self.stream)
            begin_or_resume(run, self.state, self.stream)
            self.checkpoints.resumed(run.checkpoint)
            self._call("on_init_end")

    def close(self) -> None:
        """Let go of the engine's memory and of its process groups, so that another Trainer may take its place."""
        self.checkpoints.settle()
        if self.stream is not None:
            self.stream.close()
        release(self.run)

    @inside("training", Phase.STEP)
    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train to the last step; return that step, the mean loss of this call's steps, and its speed.

        `resume_from_checkpoint`: a checkpoint's path, or True for the newest whole one in `output_dir`. A signal that
        asks for the end (SIGTERM, SIGINT, SIGUSR1, SIGHUP; of any rank) raises `signals.Stopped`, a SystemExit, after
        the step and a checkpoint.
        """
        from transformers.trainer_utils import TrainOutput

        if self.stream is None:
            raise UserError("train() needs a train_dataset")
        if resume_from_checkpoint:
            with inside("resuming"):
                resume_named(self.run, resume_from_checkpoint, self.state, self.stream)
            self.checkpoints.resumed(self.run.checkpoint)
        self.checkpoints.require_own_directory()
        run, state = self.run, self.state
        stop, first_step, start_time = 0, state.global_step, time.perf_counter()
        self.control.should_training_stop = False
        if first_step >= state.max_steps:
            run.console.warn(
                f"train(): all {state.max_steps} steps are made, so nothing is trained: to go on, make a Trainer with "
                "a larger max_steps and resume_from_checkpoint; to begin again, a Trainer with another output_dir"
            )
        rebalancer = Rebalancer(run) if run.args.rebalance_steps else None
        watching = signals.at_the_end_of_a_step(run.console.say, run.env.parent)
        with watching, Recorder(run, state) as recorder, self.checkpoints:
            self._call("on_train_begin")
            self._call("on_epoch_begin")
            self.rollback.begin(self.save_checkpoint)
            while state.global_step < state.max_steps and not (stop or self.control.should_training_stop):
                with self.rollback.guarding(recorder, self.checkpoints.finish):  # a step that is not finite is undone
                    record = self.training_step()
                    recorder.step(record)
                    stop = self._after_step(record, recorder)
                    if rebalancer is not None and not stop and rebalancer.after_step(record, state):
                        recorder.describe()
            steps, seconds, loss = state.global_step - first_step, time.perf_counter() - start_time, recorder.mean_loss
            metrics = {
                "train_runtime": seconds,
                "train_samples_per_second": steps * run.resolved.train_batch / seconds,
                "train_steps_per_second": steps / seconds,
                "train_loss": loss,
                "epoch": state.epoch,
            }
            self._end_training(stop, metrics)
        if run.resolved.config.get("comms_logger", {}).get("enabled", False):
            deepspeed.comm.log_summary()  # which DeepSpeed leaves to the training program
        return TrainOutput(state.global_step, loss, metrics)

    @inside("training", Phase.STEP)
    def training_step(self) -> StepRecord:
        """Train on the next global batch; the same step in every layout. All ranks call it.

        The stream deals out the micro-batches of this rank's data-parallel coordinate; `Engine.train_step` makes the
        forward and backward pass of each, and the update; a step that is not finite is judged before it counts.
        """
        run, state, stream = self.run, self.state, self.stream
        assert stream is not None
        records.begin_step(state.global_step + 1)
        self._call("on_step_begin")
        start_time = time.perf_counter()
        learning_rate = run.engine.learning_rate  # read before the update, which moves the schedule on
        # only the first stage needs inputs and only the last labels: stages between get an empty list
        micro_batches = stream.next_step(read=run.engine.reads_data)
        outcome = run.engine.train_step(micro_batches, state.consumed_samples, stream.length, stream.sources)
        seconds = time.perf_counter() - start_time  # the step has waited for the device: its loss is a number
        self.nonfinite.judge(state.global_step + 1, outcome, run.engine)
        state.global_step += 1
        state.consumed_samples = stream.consumed
        state.epoch = stream.epoch
        units = sum(run.trainable.loss.units(inputs) for inputs, _ in micro_batches)
        device_gib, host_gib = peak_memory_gib(run.device)
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
            source_losses=run.engine.source_losses(outcome),
            device_memory_gib=device_gib,
            host_memory_gib=host_gib,
            skipped=not outcome.applied,
        )

    def _after_step(self, record: StepRecord, recorder: Recorder) -> int:
        """Do what is due after a step: callbacks, log, evaluation, checkpoint; return the signal that ends the run."""
        control, checkpoints = self.control, self.checkpoints
        checkpoints.wait_a_moment()
        before = self.stream.before if self.stream else 0
        due = self.run.events_after(record.step, before, record.consumed_samples, self.state.max_steps)
        self._call("on_step_end", record=record)
        for event in due.epoch_events:
            self._call(event)
        if due.log:
            self._call("on_log", logs=recorder.log(record))
        stop = self._agree_on_control()
        if control.should_log and not due.log:
            self._call("on_log", logs=recorder.log(record))
        control.should_log = False
        if not stop and (control.should_evaluate or due.evaluate):
            control.should_evaluate = False
            note_evaluation(self.args, self.state, control, recorder.evaluation(self.evaluate))
            stop = self._agree_on_control()
        if stop or control.should_save or due.save:
            control.should_save = False
            ends = self.state.global_step >= self.state.max_steps
            checkpoints.begin(last=bool(stop) or control.should_training_stop or ends)
            stop = self._agree_on_control()
        return stop

    def _agree_on_control(self) -> int:
        """Set `control` to what is asked for on any rank, as a rank that acts alone would wait for ever.

        All ranks call it. A checkpoint that is being written advances where all ranks are ready. Returns the number of
        the signal that asks for the end, 0 if none does.
        """
        control, checkpoints = self.control, self.checkpoints
        own = [
            not checkpoints.is_ready,
            signals.precedence(signals.received()),
            control.should_training_stop,
            control.should_save or checkpoints.is_due,
            control.should_evaluate,
            control.should_log,
        ]
        waits, stop, ends, saves, evaluates, logs = largest(own)  # one reduction for all of it
        control.should_training_stop = bool(ends)
        control.should_save = bool(saves)
        control.should_evaluate = bool(evaluates)
        control.should_log = bool(logs)
        if not waits and checkpoints.advance():  # its callbacks may have asked for something
            return self._agree_on_control()
        return signals.of_precedence(stop)

    def _end_training(self, stop: int, metrics: Mapping[str, object]) -> None:
        """Finish what training has begun, and end the process where a signal, `stop`, asks for that."""
        self.checkpoints.finish()
        self.nonfinite.summary(self.state.global_step)
        if not stop:
            with inside("loading the best model"):
                load_best(self.run, self.state)
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
        """Return eval_loss, perplexity, eval_samples, its speed, and what `compute_metrics` makes; each sample once.

        `eval_dataset`: in place of the Trainer's, or the name of one of its; of several by name the metrics begin with
        eval_NAME. `ignore_keys` changes nothing: of a model's outputs only the logits are read. The metrics are logged.
        A signal during training raises `signals.Interrupted` on all ranks.
        """
        data: AnyDataset | Mapping[str, AnyDataset] | None = self.eval_dataset
        if isinstance(eval_dataset, str):
            if not (isinstance(data, Mapping) and eval_dataset in data):
                raise UserError(f"evaluate({eval_dataset!r}): eval_dataset has no data set of that name")
            data = data[eval_dataset]
        elif eval_dataset is not None:
            data = eval_dataset
        if isinstance(data, Mapping | None) and not data:
            raise UserError("evaluate() needs an eval_dataset")
        is_new = eval_dataset is not None and not isinstance(eval_dataset, str)
        found: JsonObject = {}
        for prefix, each in by_prefix(data, metric_key_prefix).items():
            metrics = evaluation_metrics(self.run, each, prefix, is_new=is_new)
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
        """Return logits (or what is kept of them), label_ids and metrics, the same on every rank; all ranks call it.

        `ignore_keys` changes nothing: of a model's outputs only the logits are read.
        """
        found = predict(self.run, test_dataset, metric_key_prefix)
        self._call("on_predict", metrics=found.metrics or {})
        return found

    def log(self, logs: Mapping[str, object], start_time: float | None = None) -> None:  # noqa: ARG002
        """Keep `logs` in `state.log_history`, with step and epoch, and call `on_log`; all ranks call it.

        `start_time` changes nothing: speeds are in what is logged.
        """
        logs = {**logs, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(logs)
        self._call("on_log", logs=logs)

    def _call(self, moment: str, state: TrainerState | None = None, **kwargs: Unpack[MomentValues]) -> None:
        """Call the method `moment` of every callback, in order; an evaluation that a signal interrupts ends that
        call. `state`: in the place of the run's, for what is told later than it was."""
        for callback in tuple(self.callbacks):  # one may remove itself
            with suppress(signals.Interrupted), inside(moment):
                method = getattr(callback, moment)
                method(self.args, state or self.state, self.control, **keywords(method, self), **kwargs)

    def add_callback(self, callback: AnyCallback) -> None:
        """Call this one too, after the others."""
        self.callbacks.append(own_early_stopping(instance(callback)))

    def pop_callback(self, callback: AnyCallback) -> TrainerCallback | None:
        """Remove a callback, or the first of a class, and return it; None if there is none."""
        return take_out(self.callbacks, callback)

    remove_callback = pop_callback

    @property
    def compute_metrics(self) -> Callable[[EvalPrediction], Mapping[str, object]] | None:
        """The program's own metrics."""
        return self.run.compute_metrics

    @inside("saving")
    def save_checkpoint(self) -> Path:
        """Write `output_dir/checkpoint-STEP` and wait for it; all ranks call it. Raises NotSaved, a UserError."""
        return self.checkpoints.save()

    @inside("exporting")
    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write a HuggingFace directory, adapters as peft's, of a list of layers the tensors; all ranks call it."""
        directory = Path(output_dir or self.args.output_dir)
        if output_dir is None:
            self.checkpoints.require_own_directory()
        self.checkpoints.finish()
        self.nonfinite.judge_weights(self.engine, str(directory))
        write_model(self.run, directory)
        return directory

    @inside("gathering the model")
    def trained_model(self) -> PreTrainedModel | None:
        """Return the whole model on the CPU of rank 0, None elsewhere; all ranks call it. One that was given in memory
        is filled and returned. Raises UserError for adapters and for a list of layers.
        """
        return gather_model(self.run)

    @property
    def engine(self) -> Engine:
        """The engine that trains now; a new one takes its place when layers move between stages."""
        return self.run.engine

    if not TYPE_CHECKING:  # a type checker knows the methods that there are

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse in one line what HuggingFace's Trainer has and ours does not."""
            raise missing(self, name)
