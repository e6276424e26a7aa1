"""The Trainer: shaped like HuggingFace's, over DeepSpeed's engines, in any layout.

    trainer = Trainer(model="tiny-llama", args=TrainingArguments(deepspeed_config="zero3"), train_dataset=blocks)
    trainer.train()
    trainer.save_model()

Started by the deepspeed launcher every process makes one; started by plain `python` it is alone.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from harness.checkpoint import directories, state
from harness.checkpoint.integrity import find_resume
from harness.config.model.shape import layer_drop, require_every_layer
from harness.errors import UserError
from harness.hf.lora import fingerprint
from harness.hf.skeleton import ModelSource
from harness.topology.agreement import check_agreement, require_alike
from harness.topology.env import LaunchEnv
from harness.topology.groups import build_groups
from harness.topology.layout import Layout
from harness.training.arguments import TrainingArguments
from harness.training.batches.collate import Collator, MicroBatch, collate
from harness.training.batches.stream import BatchStream, data_digest, dataset_length
from harness.training.callbacks import StepRecord, TrainerCallback, TrainerControl, TrainerState, call
from harness.training.console import Console, plain_console
from harness.training.engine.build import RunContext, build_engine
from harness.training.engine.losses import AUX_LOSS, logits_loss
from harness.training.engine.profiling import communication_summary
from harness.training.evaluate import default_batch, mean_loss
from harness.training.gathered_model import gather_model
from harness.training.hf_names import require_ours
from harness.training.nonfinite import NonFinite
from harness.training.prepare import startup_report
from harness.training.prepare.configure import configure
from harness.training.prepare.dataset_check import DatasetCheck, sample_length
from harness.training.prepare.datasets import user_datasets
from harness.training.prepare.one_model import require_one_model, take_first_ranks, tensors_in_memory
from harness.training.prepare.stages import choose_boundaries, stage_lines
from harness.training.prepare.trainable import Model, adapted, trainable_decoder, trainable_layers
from harness.training.prepare.verification import verify_plan
from harness.training.process import signals
from harness.training.process.distributed import (
    close_groups,
    largest,
    open_groups,
    require_device,
    require_precision,
    start,
)
from harness.training.report.progress import ProgressCallback
from harness.training.report.recorder import Recorder
from harness.training.resume import hyperparameters, intact, resume
from harness.training.saving import write_model


class Trainer:
    """Trains, evaluates, saves.

    Args:
        model: a preset's name or a HuggingFace directory, a config, a model in memory; or a list of layers
            (modules, LayerSpecs, functions) with `loss_fn`.
        args: the arguments; `args.deepspeed_config` is the DeepSpeed JSON.
        train_dataset, eval_dataset: map-style; items are dicts with input_ids (and labels), or with text or messages
            to be made tokens of, or pairs (inputs, labels).
        loss_fn: `loss_fn(outputs, labels)`, the mean over the samples it is given: needed for a list of layers; of a
            HuggingFace model it takes the logits, in the place of the cross entropy (see `LogitsLoss`).
        compute_loss_func: the same of a HuggingFace model with HuggingFace's signature.
        processing_class: the tokenizer, for text and messages; saved beside the model.
        data_collator: makes a micro-batch of a list of items.
        callbacks: called at the usual moments, on every rank.
        console: where to speak; by default standard output on rank 0.
        peft_config: peft's LoraConfig, to train adapters in the place of the model's weights.

    Raises:
        UserError: what the user can correct, before a model is built wherever that is possible.
    """

    def __init__(
        self,
        model: Model,
        args: TrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        processing_class: Any = None,
        data_collator: Collator = collate,
        callbacks: Sequence[TrainerCallback] = (),
        console: Console | None = None,
        peft_config: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        **others: Any,
    ) -> None:
        require_ours(type(self), Trainer, others)
        env = LaunchEnv.from_environ(os.environ)
        self.args = args
        self.launcher = env.parent
        self.output_dir = Path(args.output_dir)
        self.data_collator = data_collator
        self.console = console or plain_console(env.rank)
        source, self.adaptation = adapted(model, peft_config)
        self.adapters = fingerprint(self.adaptation, args.seed if source and source.weights is None else None)
        prepared_for = source if data_collator is collate else None
        data = user_datasets(train_dataset, eval_dataset, processing_class, prepared_for, args, env, self.console)
        self.train_dataset, self.eval_dataset, self.processing_class = data.train, data.evaluation, data.tokenizer
        steps = self._configure(env, source, model if isinstance(model, str) else None)
        context = self._join(env, steps)
        take_first_ranks(tensors_in_memory(model, source, self.adaptation), context.device, self.console)
        self.stream = self._stream()
        self.admission = DatasetCheck(source=source, context=context, collator=data_collator)
        sample = self._first_samples()
        if source is not None:
            startup_report.origin(self.console, source, args.seed)
            own_loss = logits_loss(loss_fn, compute_loss_func)
            self.trainable = trainable = trainable_decoder(
                source, context, sample_length(sample), self.adaptation, own_loss
            )
        else:
            self.trainable = trainable = trainable_layers(model, loss_fn, sample)  # type: ignore[arg-type]
        if self.trainable.causal is not None:
            verify_plan(self.trainable.causal, context, self.console)
        if self.resume_from is not None:
            directories.require_same_model(self.resume_from, self.trainable.outline)
        self.boundaries = choose_boundaries(self.trainable, context, sample)
        startup_report.compilation(self.console, self.resolved, context.device)
        self.engine = build_engine(context, trainable.layers, self.boundaries, trainable.loss, trainable.traits)
        self.stages = stage_lines(self.trainable, self.boundaries, self.engine.deepspeed.module, self.groups)
        startup_report.stages(self.console, self.layout, self.resolved, steps, self.stages)
        startup_report.adapters(self.console, self.adaptation, self.trainable)
        self.hyperparameters = hyperparameters(args, self.resolved, steps)
        self.state, self.control = TrainerState(max_steps=steps, is_world_process_zero=env.rank == 0), TrainerControl()
        self.nonfinite = NonFinite(args.nonfinite, self.console)
        self.callbacks: list[TrainerCallback] = [ProgressCallback(self.console), *callbacks]
        if self.resume_from is None:
            require_one_model(self.engine.deepspeed.module, self.groups, self.resolved.zero_stage)
        else:
            resume(self, self.resume_from)

    def close(self) -> None:
        """Let go of the engine's memory and of its process groups, so that another Trainer may take its place."""
        engine = self.engine.deepspeed
        engine.destroy()
        close_groups(self._groups_of_others)
        for held in (*engine.module.parameters(), engine):
            vars(held).clear()  # hooks of parameters refer to it, which Python cannot tell from a use
        gc.collect()

    # -- training ------------------------------------------------------------------------------------------

    def train(self) -> TrainerState:
        """Train to the last step; returns the final state.

        A signal that asks for the end (SIGTERM, SIGINT, SIGUSR1, SIGHUP; of any rank) raises `signals.Stopped`, a
        SystemExit, after the step and a checkpoint.
        """
        if self.stream is None:
            raise UserError("train() needs a train_dataset")
        stop = 0
        with signals.at_the_end_of_a_step(self.console.say, self.launcher), Recorder(self) as recorder:
            call(self.callbacks, "on_train_begin", self)
            call(self.callbacks, "on_epoch_begin", self)
            while self.state.global_step < self.state.max_steps and not (stop or self.control.should_training_stop):
                record = self.training_step()
                recorder.step(record)
                stop = self._after_step(record, recorder)
            self.nonfinite.summary(self.state.global_step)
            call(self.callbacks, "on_train_end", self)
            if stop:
                startup_report.stopped(self.console, stop, self.state.global_step)
                raise signals.Stopped(stop)
        communication_summary(self.resolved.config)
        return self.state

    def training_step(self) -> StepRecord:
        """One optimizer step over one global batch, the same in every layout."""
        call(self.callbacks, "on_step_begin", self)
        assert self.stream is not None
        begun = time.perf_counter()
        learning_rate = self.engine.learning_rate
        micro_batches = self.stream.next_step(read=self.engine.reads_data)
        outcome = self.engine.train_step(micro_batches, self.state.consumed_samples)  # forward, backward, update
        seconds = time.perf_counter() - begun
        self.nonfinite.judge(self.state.global_step + 1, outcome, self.engine)
        units = sum(self.trainable.loss.units(inputs) for inputs, _ in micro_batches) * self.layout.dp_size
        self.state.global_step += 1
        self.state.consumed_samples, self.state.epoch = self.stream.consumed, self.stream.epoch
        return StepRecord(
            step=self.state.global_step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=units / seconds,
            step_seconds=seconds,
            consumed_samples=self.stream.consumed,
            epoch=self.stream.epoch,
            aux_loss=outcome.parts.get(AUX_LOSS),
            skipped=not outcome.applied,
        )

    def _after_step(self, record: StepRecord, recorder: Recorder) -> int:
        """What is due after a step: callbacks, log, evaluation, checkpoint; returns the signal that ends the run."""
        args, step, control = self.args, record.step, self.control
        last = step == self.state.max_steps
        call(self.callbacks, "on_step_end", self, record=record)
        samples = dataset_length(self.train_dataset)
        if record.consumed_samples // samples > (record.consumed_samples - self.resolved.train_batch) // samples:
            call(self.callbacks, "on_epoch_end", self)
            if not last:
                call(self.callbacks, "on_epoch_begin", self)
        if step % args.logging_steps == 0 or last:
            logs = record.as_dict()
            recorder.log(logs)
            call(self.callbacks, "on_log", self, logs=logs)
        stop = self._agree_on_control()
        by_cadence = self.eval_dataset is not None and (last or (args.eval_steps and step % args.eval_steps == 0))
        if not stop and (control.should_evaluate or by_cadence):
            control.should_evaluate = False
            recorder.evaluation(self.evaluate)
            stop = self._agree_on_control()
        if stop or control.should_save or (args.save_steps and (last or step % args.save_steps == 0)):
            control.should_save = False
            self.save_checkpoint()
            stop = self._agree_on_control()
        return stop

    def _agree_on_control(self) -> int:
        """Do on all ranks what was asked for on any, as a rank that acts alone would wait for ever.

        Returns the number of the signal that asks for the end, 0 if none does.
        """
        control = self.control
        asked = (control.should_training_stop, control.should_save, control.should_evaluate)
        stop, *flags = largest([signals.precedence(signals.received()), *asked], self.engine.device)
        control.should_training_stop, control.should_save, control.should_evaluate = map(bool, flags)
        return signals.of_precedence(stop)

    # -- evaluation ----------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Mean loss over the evaluation data, each sample once: eval_loss, perplexity, eval_samples, eval_seconds.

        Any number of samples, any number of times. A signal during training raises `signals.Interrupted` on all ranks.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise UserError("evaluate() needs an eval_dataset")
        if eval_dataset is not None:
            require_alike({"evaluation data": data_digest(dataset)}, self.engine.device)
            self.admission.first_batch(dataset, self.eval_batch)
        begun = time.perf_counter()
        loss = mean_loss(self.engine, dataset, self.eval_batch, self.data_collator)
        metrics = {
            "eval_loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "eval_samples": dataset_length(dataset),
            "eval_seconds": time.perf_counter() - begun,
        }
        self.nonfinite.judge_evaluation(loss)
        call(self.callbacks, "on_evaluate", self, metrics=metrics)
        return metrics

    @property
    def eval_batch(self) -> int:
        """Samples of an evaluation micro-batch."""
        default = default_batch(self.trainable.loss, self.resolved.micro_batch)
        return self.args.per_device_eval_batch_size or default

    # -- saving --------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> Path:
        """Write `output_dir/checkpoint-STEP`, from which the run can go on; all ranks call it."""
        self.nonfinite.judge_weights(self.engine, f"checkpoint-{self.state.global_step}")
        progress = directories.Progress(
            step=self.state.global_step,
            consumed_samples=self.state.consumed_samples,
            layout=str(self.layout),
            zero_stage=self.resolved.zero_stage,
            precision=self.resolved.precision,
            seed=self.args.seed,
            data=self.data_digest,
            adapters=self.adapters,
            model=self.trainable.outline,
            optimizer=directories.optimizer_name(self.resolved),
            hyperparameters=self.hyperparameters,
        )
        path = state.save(self.engine.deepspeed, self.output_dir, progress, self.args.save_total_limit)
        call(self.callbacks, "on_save", self, checkpoint=path)
        return path

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the model as a HuggingFace directory, adapters as peft does, a list of layers' tensors alone.

        All ranks call it.
        """
        directory = Path(output_dir or self.output_dir)
        self.nonfinite.judge_weights(self.engine, str(directory))
        write_model(self, directory)
        return directory

    def trained_model(self) -> PreTrainedModel | None:
        """The model with its weights as they are now, on the CPU of rank 0, None on other ranks; all ranks call it.

        A model that was given in memory is filled with them and returned. Rank 0 needs memory for the whole model.

        Raises:
            UserError: for adapters and for a list of layers.
        """
        return gather_model(self)

    @property
    def model(self) -> PreTrainedModel:
        """Not there: each rank holds its own part of the model."""
        raise AttributeError("a Trainer has no .model, because each rank holds a part of it: call trained_model()")

    # -- pieces of the start -------------------------------------------------------------------------------

    def _configure(self, env: LaunchEnv, source: ModelSource | None, model: str | None) -> int:
        """Resolve config, layout and the checkpoint to resume; returns the number of steps. Nothing is built yet."""
        args = self.args
        if args.eval_steps and self.eval_dataset is None:
            raise UserError(f"--eval_steps {args.eval_steps}: there is no eval_dataset: give one")
        text_config = None if source is None else source.config.get_text_config(decoder=True)
        require_every_layer(0.0 if text_config is None else layer_drop(vars(text_config)))
        self.resolved, steps = configure(
            args,
            world_size=env.world_size,
            model=model,
            samples=None if self.train_dataset is None else dataset_length(self.train_dataset),
            hidden_size=getattr(text_config, "hidden_size", None),
        )
        self.layout = Layout.from_world(
            env.world_size,
            pp_size=self.resolved.pp_size,
            tp_size=self.resolved.tp_size,
            ep_size=self.resolved.ep_size,
        )
        self.resume_from = find_resume(self.output_dir, args.resume_from_checkpoint)
        if self.resume_from is not None:
            directories.require_same_run(self.resume_from, self.resolved)
            directories.require_same_adapters(self.resume_from, self.adapters)
        self.data_digest = "" if self.train_dataset is None else data_digest(self.train_dataset)
        return steps

    def _join(self, env: LaunchEnv, steps: int) -> RunContext:
        """Meet the other ranks, and make sure that all are about to do the same."""
        device = start(env)
        require_precision(self.resolved.precision)
        require_device(self.resolved.config, device)
        check_agreement(
            self.resolved.config,
            self.layout,
            device=device,
            others={
                "set of arguments": {item.name: str(getattr(self.args, item.name)) for item in fields(self.args)},
                "training data": self.data_digest,
                "evaluation data": "" if self.eval_dataset is None else data_digest(self.eval_dataset),
                "set of adapters": self.adapters,
                "checkpoint to resume": str(self.resume_from),
            },
        )
        self._groups_of_others = open_groups()
        self.groups = build_groups(self.layout)
        startup_report.version(self.console)
        self.resume_from = intact(self.resume_from, self)
        startup_report.placement(self.console, self.layout, env)
        return RunContext(args=self.args, resolved=self.resolved, groups=self.groups, device=device, max_steps=steps)

    def _first_samples(self) -> MicroBatch | None:
        """A micro-batch of the training data, after a look at both data sets."""
        self.admission.first_batch(self.eval_dataset, self.args.per_device_eval_batch_size or self.resolved.micro_batch)
        return self.admission.first_batch(self.train_dataset, self.resolved.micro_batch)

    def _stream(self) -> BatchStream | None:
        if self.train_dataset is None:
            return None
        return BatchStream(
            self.train_dataset,
            seed=self.args.seed,
            micro_batch=self.resolved.micro_batch,
            accumulation=self.resolved.accumulation,
            data_rank=self.groups.coordinate.dp_rank,
            data_size=self.layout.dp_size,
            data_collator=self.data_collator,
        )
