"""Plan a run on this rank alone: model, data, config, layout, the checkpoint to resume.

There are no collectives here, with one exception: one rank of each host tokenises text for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import deepspeed
import torch
import transformers
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig, read_run_config
from harness.arguments.themes.flags import Help, default_of
from harness.arguments.themes.reporting import monitor_sections
from harness.batches.collate import Collator, collate
from harness.batches.evaluation import evaluation_digest
from harness.batches.given import require_types
from harness.batches.stream import data_digest, dataset_length, require_samples
from harness.checkpoint.directories import TrainingProgress, optimizer_name
from harness.checkpoint.integrity import require_listed_weights
from harness.checkpoint.resumption import ResumeRequest
from harness.config import Resolved
from harness.config.model.facts import layer_drop, require_every_layer
from harness.console import Console
from harness.device.process_group import require_supported
from harness.errors import UserError, refuse_all
from harness.hf.adapters import Adapters
from harness.hf.skeleton import ModelSource
from harness.hf.weights.tensor_files import sampled
from harness.topology.env import LaunchEnv
from harness.topology.layout import Layout
from harness.training.engine.losses import LossFunction
from harness.training.engine.outputs import Preprocess
from harness.training.engine.spec import EngineSpec
from harness.training.parts import Parts, needed
from harness.training.parts.data import FOLDER, DataRequest, Datasets, UserData, given_samples
from harness.training.parts.objective import Objective
from harness.training.prepare.trainable import Model, model_source, shaping

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from transformers.trainer_utils import EvalPrediction


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What the Trainer is given besides `args` and data, and the launch environment of this process.

    Attributes:
        parts: the installed parts around the core.
        objective: replaces next-token training; None for the cross entropy or a user's loss.
        flags: flags of the script besides `args`.
    """

    model: Model
    console: Console
    env: LaunchEnv
    parts: Parts = field(default_factory=Parts)
    objective: Objective | None = None
    loss_fn: LossFunction | None = None
    compute_loss_func: LossFunction | None = None
    data_collator: Collator = collate
    peft_config: LoraConfig | None = None
    quantization_config: BitsAndBytesConfig | None = None
    flags: Mapping[str, object] = field(default_factory=dict)
    optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None)
    compute_metrics: Callable[[EvalPrediction], Mapping[str, object]] | None = None
    preprocess_logits_for_metrics: Preprocess | None = None

    def data_request(self, args: TrainingArguments, config: RunConfig, source: ModelSource | None) -> DataRequest:
        """Return what the samples of a run are made for."""
        # A user's collator receives the rows unchanged, unless an objective makes its own samples of them.
        makes_samples = self.data_collator is collate or self.objective is not None
        return DataRequest(
            args=args,
            config=config,
            source=source if makes_samples else None,
            env=self.env,
            console=self.console,
        )

    @property
    def objective_settings(self) -> str:
        """The settings of the objective; "" for the next token, or a user's own loss."""
        return "" if self.objective is None else self.objective.settings


@dataclass(frozen=True, kw_only=True)
class RunSpec(EngineSpec):
    """The specification of a run: as planned on this rank, until all ranks have met and settled it (`prepare_run`).

    Attributes:
        source: the decoder's config and weights; None for a list of layers.
        adapter_fingerprint: identifies the adapters; "" without adapters.
        samples: number of training samples; None without training data.
        data_digest, evaluation_digest: hashes of the data sets; "" without data.
        config: the DeepSpeed JSON, read and checked once.
    """

    inputs: RunInputs
    source: ModelSource | None
    adaptation: Adapters | None
    adapter_fingerprint: str
    samples: int | None
    data_digest: str
    evaluation_digest: str
    config: RunConfig
    layout: Layout

    @property
    def console(self) -> Console:
        return self.inputs.console

    @property
    def parts(self) -> Parts:
        return self.inputs.parts

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name as stored in checkpoints."""
        return optimizer_name(self.resolved) if self.user_optimizer is None else self.user_optimizer.name

    @property
    def resume_request(self) -> ResumeRequest:
        """The request to resume the checkpoint that the arguments name."""
        return ResumeRequest(
            output_dir=self.output_dir,
            wanted=self.args.resume_from_checkpoint,
            overwrites=self.args.overwrite_output_dir,
            trains=self.samples is not None,
            optimizer=self.optimizer_name,
            adapters=self.adapter_fingerprint,
            objective=self.inputs.objective_settings,
        )

    def fingerprint(self) -> dict[str, object]:
        """Return what must be equal on all ranks besides config, layout and code: its name in errors -> a JSON value.

        Raises UserError or OSError if the weight files cannot be read.
        """
        source, optimizer = self.source, self.user_optimizer
        weights = None if source is None else source.weights
        return {
            # Without the build (2.11.0+cu128): hosts with other drivers have other builds of one version.
            "set of versions (torch, transformers, DeepSpeed)": [
                package.__version__.partition("+")[0] for package in (torch, transformers, deepspeed)
            ],
            "model config": {} if source is None else shaping(source.config),
            "origin of the weights (files, memory or seed)": type(weights).__name__,
            # Hosts may have the files on disks of their own.
            "set of weight files": sampled(weights) if isinstance(weights, Path) else {},
            "set of arguments": {item.name: str(getattr(self.args, item.name)) for item in fields(self.args)},
            "training data": self.data_digest,
            "evaluation data": self.evaluation_digest,
            "set of adapters": self.adapter_fingerprint,
            "objective": self.inputs.objective_settings,
            "optimizer that was given": "" if optimizer is None else optimizer.description,
        }

    def resolved_at(self, progress: TrainingProgress) -> tuple[Resolved, int]:
        """Return the config and the number of steps of a run that resumes at `progress`."""
        # With --num_train_epochs they depend on the remaining samples: the saved run may have had another global batch.
        resolved, max_steps, _ = resolve_for(self.source, self.args, self.config, self.samples, progress)
        return resolved, max_steps


def plan_run(
    args: TrainingArguments, inputs: RunInputs, given: UserData, config: RunConfig | None = None
) -> tuple[RunSpec, Datasets]:
    """Resolve model, data, config and layout to a specification; return it, and the data sets as samples.

    Builds nothing. Raises UserError if the inputs conflict.

    Args:
        config: the checked config, if the program has already read it with `args` and checked it for the device.
    """
    # From cheap to dear: types, model and config are refused before the data is read, which may take hours.
    _require_types(args, inputs, given)
    _require_evaluation(args, given, inputs.parts)
    source, adaptation = _source(inputs)
    if inputs.objective is not None:
        source = _for_objective(args, inputs, inputs.objective, source)
    if source is None:
        _require_for_layers(args, inputs)
    elif isinstance(source.weights, Path):
        require_listed_weights(source.weights)
    model = inputs.model if isinstance(inputs.model, str) else None
    if config is None:
        config = read_run_config(args, world_size=inputs.env.world_size, check=inputs.parts.check_config, model=model)
        require_supported(config.resolved)
    # The watchdog starts when the ranks have met, and tokenising may take hours: until then detect stopped processes.
    with inputs.parts.watch.for_stopped_ranks(args.hang_seconds, inputs.console):
        data = _samples(inputs.parts, given, inputs.data_request(args, config, source))
    if source is not None and inputs.parts.data is not None:
        source = inputs.parts.data.stop_at_answers(source, data, inputs.console)
    samples = None if data.train is None else dataset_length(data.train)
    resolved, max_steps, layout = resolve_for(source, args, config, samples)
    if samples is not None:
        require_samples(samples, resolved.micro_batch, resolved.accumulation, resolved.batch_ranks)
    if source is None:
        _require_config_for_layers(resolved)
    _require_parts(args, inputs.parts, resolved)
    user_optimizer = None
    if inputs.optimizers not in (None, (None, None)):
        find = needed(inputs.parts.user_optimizer, "optimizers", "harness.extras")
        user_optimizer = find(inputs, source, adaptation, resolved, layout)
    # A base model without weights is drawn from the seed, so adapters trained on it fit no other seed.
    base_seed = args.seed if source is not None and source.weights is None else None
    spec = RunSpec(
        args=args,
        inputs=inputs,
        source=source,
        adaptation=adaptation,
        adapter_fingerprint="" if adaptation is None else adaptation.fingerprint(base_seed),
        samples=samples,
        data_digest="" if data.train is None else data_digest(data.train),
        evaluation_digest=evaluation_digest(data.evaluation),
        config=config,
        resolved=resolved,
        layout=layout,
        max_steps=max_steps,
        compression=inputs.parts.compression,
        user_optimizer=user_optimizer,
    )
    for note in inputs.parts.argument_notes(args.without_effect):
        inputs.console.say(note)
    if inputs.parts.check_config is not None and (warning := inputs.parts.check_config.version_warning()):
        inputs.console.warn(warning)
    return spec, data


def _require_parts(args: TrainingArguments, parts: Parts, resolved: Resolved) -> None:
    if resolved.gradient_bits != 0:
        needed(parts.compression, "gradient_compression", "harness.extras")
    if args.dataloader_num_workers:
        needed(parts.read_ahead, "--dataloader_num_workers", "harness.extras")
    if args.nonfinite == "rollback":
        needed(parts.rollback, "--nonfinite rollback", "harness.extras")
    if resolved.loss_tile or resolved.feed_forward_tile or resolved.attention_tile:
        needed(parts.plan_tokens, "tiling", "harness.verify")
    if args.rebalance_steps:
        needed(parts.rebalancer, "--rebalance_steps", "harness.extras")
    if parts.monitors is None and monitor_sections(args, args.output_dir, resolved.config):
        needed(parts.monitors, "--report_to", "harness.extras")


def _samples(parts: Parts, given: UserData, request: DataRequest) -> Datasets:
    if parts.data is not None:
        return parts.data.user_datasets(given, request)
    for name in ("packing", "sample_prompts"):
        if getattr(request.args, name):
            needed(parts.data, f"--{name}", FOLDER)
    return given_samples(given, request)


def _source(inputs: RunInputs) -> tuple[ModelSource | None, Adapters | None]:
    """Return the source of a decoder (None for a list of layers) and its adapters, if any."""
    find = inputs.parts.adapters
    if find is None:
        if inputs.peft_config or inputs.quantization_config or getattr(inputs.model, "peft_config", None):
            needed(find, "LoRA", "harness.extras")
        return model_source(inputs.model), None
    return find(inputs.model, inputs.peft_config, inputs.quantization_config)


def _for_objective(
    args: TrainingArguments, inputs: RunInputs, objective: Objective, source: ModelSource | None
) -> ModelSource:
    """Return the model as the objective trains it. UserError for arguments that have no effect with it."""
    if source is None:
        raise UserError(f"{objective.name} needs a HuggingFace model, not a list of layers")
    given = {
        "loss_fn": inputs.loss_fn is not None,
        "compute_loss_func": inputs.compute_loss_func is not None,
    }
    problems = [
        f"{name} has no effect with {objective.name}, a loss of its own: remove it" for name in given if given[name]
    ]
    refuse_all([*problems, *objective.obstacles(args)])
    return replace(source, prepare=objective.prepare_model)


def resolve_for(
    source: ModelSource | None,
    args: TrainingArguments,
    config: RunConfig,
    samples: int | None,
    progress: TrainingProgress | None = None,
) -> tuple[Resolved, int, Layout]:
    """Return the config resolved for this model and number of samples, the number of steps, and the layout.

    Args:
        progress: progress of the checkpoint to resume.
    """
    text_config = None if source is None else source.config.get_text_config(decoder=True)
    require_every_layer(0.0 if text_config is None else layer_drop(vars(text_config)))
    # For ZeRO's "auto" bucket sizes.
    hidden_size = getattr(text_config, "hidden_size", None)
    done = {} if progress is None else {"step": progress.step, "trained_samples": progress.trained_samples}
    resolved, max_steps = config.for_data(args, samples, hidden_size, **done)
    sizes = {name: getattr(resolved, name) for name in ("pp_size", "tp_size", "ep_size", "cp_size")}
    return resolved, max_steps, Layout.from_world(config.values.world_size, **sizes)


def _require_for_layers(args: TrainingArguments, inputs: RunInputs) -> None:
    """Raise UserError for arguments that apply only to HuggingFace models."""
    problems = [
        f"--{item.name} needs a HuggingFace model, not a list of layers"
        for item in fields(TrainingArguments)
        if Help.of(item).hf_only and getattr(args, item.name) != default_of(item)
    ]
    if inputs.compute_loss_func is not None:
        problems.append("compute_loss_func is for a HuggingFace model: give a list of layers loss_fn(outputs, labels)")
    refuse_all(problems)


def _require_config_for_layers(resolved: Resolved) -> None:
    """Raise UserError for keys of the DeepSpeed JSON that apply only to HuggingFace models."""
    acting = {
        "expert_parallel.autoep_size": resolved.ep_size > 1,
        "tensor_parallel.sequence_parallel": resolved.sequence_parallel,
        "context_parallel.size": resolved.cp_size > 1,
        "tiling.loss": resolved.loss_tile > 0,
        "tiling.feed_forward": resolved.feed_forward_tile > 0,
        "tiling.attention": resolved.attention_tile > 0,
    }
    needing = [key for key, acts in acting.items() if acts]
    refuse_all([f"{key} needs a HuggingFace model, not a list of layers: remove it" for key in needing])


def _require_types(args: TrainingArguments, inputs: RunInputs, given: UserData) -> None:
    require_types(
        args,
        {
            "data_collator": inputs.data_collator,
            "loss_fn": inputs.loss_fn,
            "compute_loss_func": inputs.compute_loss_func,
            "compute_metrics": inputs.compute_metrics,
            "preprocess_logits_for_metrics": inputs.preprocess_logits_for_metrics,
        },
        {"train_dataset": given.train_dataset, "eval_dataset": given.eval_dataset},
        given.processing_class,
    )


def _require_evaluation(args: TrainingArguments, given: UserData, parts: Parts) -> None:
    """Raise UserError for evaluations without data, and for rollbacks without complete checkpoints."""
    if args.evaluates and given.eval_dataset is None:
        flags = f"--eval_steps {args.eval_steps}" if args.eval_steps else f"--eval_strategy {args.eval_strategy}"
        raise UserError(f"{flags}: needs an eval_dataset: give one")
    comparing = {
        "--early_stopping_patience": args.early_stopping_patience,
        "--load_best_model_at_end": args.load_best_model_at_end,
        "--metric_for_best_model": args.metric_for_best_model,
        "--save_strategy best": args.save_strategy == "best",
    }
    for flag, is_given in comparing.items():
        if is_given:
            needed(parts.best_model, flag, "harness.extras").require_metric_of_one(args, given.eval_dataset)
    if args.save_only_model and args.nonfinite == "rollback":
        raise UserError("--nonfinite rollback needs complete checkpoints: remove --save_only_model")
