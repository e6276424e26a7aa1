"""Plan a run on this rank alone: model, data, config, layout, the checkpoint to resume.

There are no collectives here, with one exception: one rank of each host tokenises text for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig, read_run_config
from harness.arguments.themes.flags import Help, default_of
from harness.arguments.themes.reporting import monitor_sections
from harness.batches.collate import Collator, collate
from harness.batches.given import require_types
from harness.batches.stream import data_digest, dataset_length, require_samples
from harness.checkpoint import training_state
from harness.checkpoint.directories import (
    TrainingProgress,
    optimizer_name,
    set_aside_foreign,
    set_aside_newer,
)
from harness.checkpoint.integrity import (
    damaged,
    find_resume,
    foreign,
    require_listed_weights,
    unlisted,
    wait_until_seen,
)
from harness.checkpoint.saved_run import SavedRun
from harness.config import Resolved
from harness.config.model.facts import layer_drop, require_every_layer
from harness.console import Console
from harness.device.process_group import require_supported
from harness.errors import UserError, refuse_all
from harness.hf.adapters import Adapters
from harness.hf.skeleton import ModelSource
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import all_or_none, broadcast_object
from harness.topology.env import LaunchEnv
from harness.topology.layout import Layout
from harness.training.engine.losses import LossFunction
from harness.training.engine.optimizer import GivenOptimizer
from harness.training.engine.outputs import Preprocess
from harness.training.engine.spec import EngineSpec
from harness.training.parts import Parts, needed
from harness.training.parts.data import FOLDER, DataRequest, Datasets, UserData, given_samples
from harness.training.parts.objective import Objective
from harness.training.prepare.trainable import Model, model_source

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

    @property
    def makes_samples(self) -> bool:
        """Whether rows are turned into samples; a user's collator receives them unchanged."""
        return self.data_collator is collate or self.objective is not None

    def data_request(self, args: TrainingArguments, config: RunConfig, source: ModelSource | None) -> DataRequest:
        """Return what the samples of a run are made for."""
        return DataRequest(
            args=args,
            config=config,
            source=source if self.makes_samples else None,
            env=self.env,
            console=self.console,
        )

    @property
    def objective_settings(self) -> str:
        """The settings of the objective; "" for the next token, or a user's own loss."""
        return "" if self.objective is None else self.objective.settings


@dataclass(frozen=True, kw_only=True)
class RunSpec(EngineSpec):
    """The specification of a run: first as planned on this rank, then as agreed by all ranks.

    Attributes:
        source: the decoder's config and weights; None for a list of layers.
        adapter_fingerprint: identifies the adapters; "" without adapters.
        data: the tokenised data sets and their tokenizer.
        data_digest: hash of the training data; "" without training data.
        config: the DeepSpeed JSON, read and checked once.
        checkpoint: the checkpoint to resume; None for a run that begins at step 0.
    """

    inputs: RunInputs
    source: ModelSource | None
    adaptation: Adapters | None
    adapter_fingerprint: str
    data: Datasets
    data_digest: str
    config: RunConfig
    layout: Layout
    checkpoint: Path | None

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


def plan_run(args: TrainingArguments, inputs: RunInputs, given: UserData, config: RunConfig | None = None) -> RunSpec:
    """Resolve model, data, config and layout without building anything. Raises UserError if they conflict.

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
    samples = None if data.train is None else dataset_length(data.train)
    resolved, max_steps, layout = resolve_for(source, args, config, samples)
    if samples is not None:
        require_samples(samples, resolved.micro_batch, resolved.accumulation, resolved.batch_ranks)
    if source is None:
        _require_config_for_layers(resolved)
    _require_parts(args, inputs.parts, resolved)
    # A base model without weights is drawn from the seed, so adapters trained on it fit no other seed.
    base_seed = args.seed if source is not None and source.weights is None else None
    spec = RunSpec(
        args=args,
        inputs=inputs,
        source=source,
        adaptation=adaptation,
        adapter_fingerprint="" if adaptation is None else adaptation.fingerprint(base_seed),
        data=data,
        data_digest="" if data.train is None else data_digest(data.train),
        config=config,
        resolved=resolved,
        layout=layout,
        max_steps=max_steps,
        checkpoint=None,
        compression=inputs.parts.compression,
        user_optimizer=_user_optimizer(inputs, source, adaptation, resolved, layout),
    )
    if args.resume_from_checkpoint is not None and not args.rank_0_finds_checkpoint:
        return replace(spec, checkpoint=checkpoint_to_resume(spec))
    return spec


def _require_parts(args: TrainingArguments, parts: Parts, resolved: Resolved) -> None:
    """Raise UserError if a part that the run needs is not installed."""
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
    """Return the data sets as samples."""
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


def _user_optimizer(
    inputs: RunInputs, source: ModelSource | None, adaptation: Adapters | None, resolved: Resolved, layout: Layout
) -> GivenOptimizer | None:
    """Return the Trainer's `optimizers`, or None. Raises UserError if this run cannot train with them."""
    if inputs.optimizers in (None, (None, None)):
        return None
    find = needed(inputs.parts.user_optimizer, "optimizers", "harness.extras")
    return find(inputs, source, adaptation, resolved, layout)


def checkpoint_to_resume(spec: RunSpec) -> Path | None:
    """Return the checkpoint that `--resume_from_checkpoint` names; None for a run that begins at step 0.

    If `args.rank_0_finds_checkpoint`, only rank 0 calls it, after the ranks have met, and sends its result or error to
    the others.

    Raises UserError for a checkpoint that this run cannot continue.
    """
    args = spec.args
    checkpoint = find_resume(spec.output_dir, args.resume_from_checkpoint, overwrites=args.overwrite_output_dir)
    if checkpoint is not None:
        require_same_training(checkpoint, spec)
    return checkpoint


def require_same_training(checkpoint: Path, spec: RunSpec) -> SavedRun:
    """Return the state in a checkpoint. Raises UserError if its optimizer, adapters or objective are not the run's."""
    saved = SavedRun.read(checkpoint)
    saved.require_same_optimizer(spec.optimizer_name)
    saved.require_same_adapters(spec.adapter_fingerprint)
    saved.require_same_objective(spec.inputs.objective_settings)
    return saved


def chosen_by_rank_0(find: Callable[[], Path | None]) -> Path | None:
    """Return the checkpoint that rank 0 finds, once this host sees all of it; all ranks call it.

    A host may see the newest checkpoint late (NFS), and must not take an older one than the others.

    Raises:
        UserError: on all ranks, if rank 0 finds no usable checkpoint, or a host does not see the one it finds.
    """
    chosen = broadcast_object(all_or_none(lambda: find() if dist.get_rank() == 0 else None))
    if chosen is not None:
        all_or_none(lambda: wait_until_seen(chosen, THIS_RANK.host))
    return chosen


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
    hidden_size = getattr(text_config, "hidden_size", None)
    done = {} if progress is None else {"step": progress.step, "trained_samples": progress.trained_samples}
    resolved, max_steps = config.for_data(args, samples, hidden_size, **done)
    sizes = {name: getattr(resolved, name) for name in ("pp_size", "tp_size", "ep_size", "cp_size")}
    return resolved, max_steps, Layout.from_world(config.values.world_size, **sizes)


def with_steps_left(spec: RunSpec, progress: TrainingProgress) -> RunSpec:
    """Return the spec with the number of steps of a run that resumes at `progress`.

    With --num_train_epochs it depends on the remaining samples, because the saved run may have had another global
    batch.
    """
    samples = dataset_length(spec.data.train)
    resolved, max_steps, _ = resolve_for(spec.source, spec.args, spec.config, samples, progress)
    return replace(spec, resolved=resolved, max_steps=max_steps)


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


def intact_checkpoint(spec: RunSpec, args: TrainingArguments) -> Path | None:
    """Verify the checkpoint to resume by its checksums and return it; all ranks call it.

    With `auto`, a damaged checkpoint is replaced by the newest intact one; if none is intact, the run begins at step 0.
    Both cases are reported. `args` are the run's arguments, perhaps changed by `train(resume_from_checkpoint=...)`.

    Raises:
        UserError: on all ranks, if the checkpoint is damaged and `auto` is not set.
    """
    auto, output_dir, console = args.resume_from_checkpoint == "auto", spec.output_dir, spec.console
    is_first = spec.inputs.env.rank == 0
    incomplete = all_or_none(lambda: damaged(output_dir, spec.checkpoint) if auto and is_first else [])
    chosen, changed = training_state.first_unchanged(spec.checkpoint, output_dir, auto=auto)
    # An older checkpoint in place of a damaged one has not been compared with this run yet.
    if chosen is not None and chosen != spec.checkpoint:
        require_same_training(chosen, spec)
    tidied = all_or_none(lambda: _tidied(spec, chosen, auto=auto) if is_first else [])
    left_out = [*incomplete, *changed]
    for line in [*tidied, *(f"{line}: ignored" for line in left_out)]:
        console.warn(line)
    if auto and chosen is None:
        console.say(f"no {'whole ' if left_out else ''}checkpoint in {args.output_dir}: starting from scratch")
    return chosen


def _tidied(spec: RunSpec, chosen: Path | None, *, auto: bool) -> list[str]:
    """Rename the checkpoints that this run will not continue; return warnings about them and about `chosen`."""
    lines, output_dir = [], spec.output_dir
    trains = spec.data.train is not None  # an evaluation leaves all checkpoints where they are
    if trains and auto:
        renamed = set_aside_foreign(foreign(output_dir))
        lines = [f"{path} was saved by another run: it is now {moved}" for path, moved in renamed]
    elif trains and chosen is not None and chosen.resolve().parent == output_dir.resolve():
        newer = set_aside_newer(output_dir, output_dir / chosen.name)
        lines = [f"resuming from {chosen}: a newer checkpoint is now {path}" for path in newer]
    if chosen is not None and (others := unlisted(chosen)):
        lines.append(f"{chosen} contains {', '.join(others)}, which it was not saved with: ignored")
    return lines
