"""The Trainer: shaped like HuggingFace's, over DeepSpeed's engines, in any layout.

    trainer = Trainer(model="tiny-llama", args=TrainingArguments(deepspeed_config="zero3"), train_dataset=blocks)
    trainer.train()
    trainer.save_model()

Started by the deepspeed launcher every process makes one; started by plain `python` it is alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from transformers import PreTrainedModel

from harness.arguments import TrainingArguments
from harness.config.values.json_object import JsonObject
from harness.console import Console, plain_console
from harness.data.batches.collate import AnyDataset, Collator, collate
from harness.data.inputs.datasets import own_tokenizer
from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.resilience.process import records, signals
from harness.resilience.watch.activity import Phase, inside
from harness.topology.env import LaunchEnv
from harness.training.best_model import asked_for, own_early_stopping
from harness.training.callbacks import (
    AnyCallback,
    StepRecord,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    call,
    instance,
    instances,
    take_out,
)
from harness.training.engine.kept_outputs import Preprocess
from harness.training.engine.losses import LossFunction
from harness.training.engine.profiling import communication_summary
from harness.training.evaluate import evaluate_each, predict
from harness.training.hf_names import require_ours
from harness.training.metrics import OwnMetrics
from harness.training.nonfinite import NonFinite
from harness.training.prepare.plan import RunInputs
from harness.training.prepare.run import PreparedRun, prepare_run, release, training_stream
from harness.training.prepare.trainable import Model
from harness.training.rebalancing.rebalancer import Rebalancer
from harness.training.recording.profiler import profiler
from harness.training.recording.progress import ProgressCallback
from harness.training.recording.recorder import Recorder
from harness.training.saving.checkpoints import Checkpoints
from harness.training.saving.gathered_model import gather_model, with_config
from harness.training.saving.resume import begin_or_resume, resume_named
from harness.training.saving.rollback import Rollback
from harness.training.saving.writing import write_model
from harness.training.step import after_step, end_training, initial_state, one_step

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers.trainer_utils import EvalPrediction, PredictionOutput


class Trainer:
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

    Attributes:
        run: what preparation found: config, layout, groups, model, engine.
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
        **others: object,
    ) -> None:
        require_ours(type(self), Trainer, others)
        env = LaunchEnv.from_environ(os.environ)
        inputs = RunInputs(
            model=model, args=args, console=console or plain_console(env.rank), env=env,
            train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator,
            loss_fn=loss_fn, compute_loss_func=compute_loss_func, peft_config=peft_config,
            processing_class=processing_class or own_tokenizer(model), names_checkpoint_later=True,
            metrics=OwnMetrics(compute=compute_metrics, preprocess=preprocess_logits_for_metrics),
        )  # fmt: skip
        self._begin(inputs, callbacks)

    @classmethod
    def from_inputs(cls, inputs: RunInputs, callbacks: Sequence[AnyCallback] = ()) -> Self:
        """Return a Trainer of what `harness.train` has read and checked already."""
        trainer = cls.__new__(cls)
        cls._begin(trainer, inputs, callbacks)
        return trainer

    @inside("preparing")
    def _begin(self, inputs: RunInputs, callbacks: Sequence[AnyCallback]) -> None:
        """Prepare the run, and resume it where there is a checkpoint to resume."""
        given = instances(callbacks)
        self.run = run = prepare_run(inputs)
        self.args, self.engine = run.args, run.engine
        self.train_dataset, self.eval_dataset = run.plan.data.train, run.plan.data.evaluation
        self.processing_class, self.state, self.control = run.plan.data.tokenizer, initial_state(run), TrainerControl()
        self.nonfinite = NonFinite(run.args.nonfinite, run.console)
        self.callbacks: list[TrainerCallback] = [
            ProgressCallback(run.console, run.trainable.speed_unit),
            *map(own_early_stopping, given),
            *asked_for(run.args),
            *profiler(run.args),
        ]
        overridden = None if type(self).save_checkpoint is Trainer.save_checkpoint else self.save_checkpoint
        saved = partial(call, self.callbacks, "on_save", self)
        self.checkpoints = Checkpoints(run, self.state, self.nonfinite, saved, overridden)
        self.stream = training_stream(run)
        self.rollback = Rollback(run, self.state, self.stream)
        begin_or_resume(run, self.state, self.stream)
        self.checkpoints.resumed(run.plan.checkpoint)
        call(self.callbacks, "on_init_end", self)

    def close(self) -> None:
        """Let go of the engine's memory and of its process groups, so that another Trainer may take its place."""
        self.checkpoints.settle()
        if self.stream is not None:
            self.stream.close()
        release(self.run)

    @inside("training", Phase.STEP)
    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainerState:
        """Train to the last step; returns the final state.

        `resume_from_checkpoint`: a checkpoint's path, or True for the newest whole one in `output_dir`. A signal that
        asks for the end (SIGTERM, SIGINT, SIGUSR1, SIGHUP; of any rank) raises `signals.Stopped`, a SystemExit, after
        the step and a checkpoint.
        """
        if self.stream is None:
            raise UserError("train() needs a train_dataset")
        if resume_from_checkpoint:
            with inside("resuming"):
                self._go_on_with(resume_named(self.run, resume_from_checkpoint, self.state, self.stream))
            self.checkpoints.resumed(self.run.plan.checkpoint)
        self.checkpoints.require_own_directory()
        run, stop = self.run, 0
        rebalancer = Rebalancer(run) if run.args.rebalance_steps else None
        watching = signals.at_the_end_of_a_step(run.console.say, run.inputs.env.parent)
        with watching, Recorder(run, self.state) as recorder, self.checkpoints:
            call(self.callbacks, "on_train_begin", self)
            call(self.callbacks, "on_epoch_begin", self)
            self.rollback.begin(self.save_checkpoint)
            while self.state.global_step < self.state.max_steps and not (stop or self.control.should_training_stop):
                with self.rollback.guarding(recorder, self.checkpoints.finish):
                    record = self.training_step()
                    recorder.step(record)
                    stop = after_step(self, record, recorder)
                    if rebalancer is not None and not stop and rebalancer.after_step(record, self.state):
                        self._go_on_with(rebalancer.run)
                        recorder.describe(rebalancer.run)
            end_training(self, stop)
        communication_summary(run.resolved.config)
        return self.state

    def _go_on_with(self, run: PreparedRun) -> None:
        self.run = self.checkpoints.run = self.rollback.run = run
        self.engine = run.engine

    @inside("training", Phase.STEP)
    def training_step(self) -> StepRecord:
        """One optimizer step over one global batch, the same in every layout."""
        records.begin_step(self.state.global_step + 1)
        call(self.callbacks, "on_step_begin", self)
        assert self.stream is not None
        return one_step(self.run, self.stream, self.state, self.nonfinite)

    @inside("evaluating")
    def evaluate(
        self,
        eval_dataset: AnyDataset | Mapping[str, AnyDataset] | str | None = None,
        metric_key_prefix: str = "eval",
    ) -> JsonObject:
        """Return eval_loss, perplexity, eval_samples, eval_seconds, and what `compute_metrics` makes; each sample once.

        `eval_dataset`: in place of the Trainer's, or the name of one of its; of several by name the metrics begin with
        eval_NAME. A signal during training raises `signals.Interrupted` on all ranks.
        """
        return evaluate_each(self, eval_dataset, metric_key_prefix)

    @inside("predicting")
    def predict(self, test_dataset: AnyDataset, metric_key_prefix: str = "test") -> PredictionOutput:
        """Return logits (or what is kept of them), label_ids and metrics, the same on every rank; all ranks call it."""
        found = predict(self.run, test_dataset, self.run.inputs.metrics, metric_key_prefix)
        call(self.callbacks, "on_predict", self, metrics=found.metrics or {})
        return found

    def add_callback(self, callback: AnyCallback) -> None:
        """Call this one too, after the others."""
        self.callbacks.append(own_early_stopping(instance(callback)))

    def pop_callback(self, callback: AnyCallback) -> TrainerCallback | None:
        """Remove a callback, or the first of a class, and return it; None if there is none."""
        return take_out(self.callbacks, callback)

    remove_callback = pop_callback

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
    def model(self) -> Any:
        """This rank's layers, and the config; `trained_model()` gathers the whole model."""
        return with_config(self.run)
