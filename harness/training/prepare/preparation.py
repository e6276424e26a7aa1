"""Prepare a planned run (`plan.py`) for its first step.

All ranks meet and compare config, code, model and data before the model is built.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import cast

import deepspeed
import torch
import torch.distributed as dist
import transformers

from harness.atomic import room
from harness.batches.collate import MicroBatch, TokenCollator
from harness.batches.evaluation import by_prefix, evaluation_digest
from harness.batches.order import SeveralSources
from harness.batches.stream import BatchStream, dataset_length
from harness.checkpoint.integrity import run_id
from harness.checkpoint.run_lock import lock_directory, unlock_directory
from harness.checkpoint.saved_run import SavedRun
from harness.console import Console
from harness.deepspeed.pipeline import Layer
from harness.deepspeed.process_wide import silence_prints
from harness.device.process_group import (
    close_groups,
    mixed_devices,
    open_groups,
    require_device,
    require_precision,
    start,
)
from harness.errors import UserError
from harness.hf.locate import presets
from harness.hf.skeleton import ModelSource, position_limit
from harness.hf.weights.tensor_files import sampled
from harness.parallel.collectives import leave_memory
from harness.parallel.compiling import waits_for_compiler
from harness.parallel.memory import keep_freed_memory, malloc_trim
from harness.resilience.process.activity import ACTIVITY
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import (
    all_gather_on_host,
    all_or_none,
    broadcast_object,
    check_agreement,
    gather_object,
)
from harness.topology.groups import Groups, build_groups
from harness.topology.hosts import Hosts, host_id
from harness.training.engine.build import build_engine
from harness.training.engine.losses import logits_loss, reporting_sources, with_objective
from harness.training.engine.optimizer import compiled_optimizer
from harness.training.parts import RunPrediction, needed
from harness.training.parts.data import SamplePrompts
from harness.training.prepare.dataset_check import OTHERS, DatasetCheck, meaning_of, sample_length
from harness.training.prepare.one_model import take_first_ranks, tensors_in_memory
from harness.training.prepare.plan import (
    RunSpec,
    checkpoint_to_resume,
    chosen_by_rank_0,
    intact_checkpoint,
    with_steps_left,
)
from harness.training.prepare.run import Run
from harness.training.prepare.stages import choose_boundaries, report_stages, stage_costs, stage_lines
from harness.training.prepare.trainable import (
    TrainableModel,
    require_compilable,
    shaping,
    trainable_decoder,
    trainable_layers,
)


def prepare_run(spec: RunSpec) -> Run:
    """Prepare everything that training needs; all ranks call it. Raises UserError for what the user can correct."""
    args, console = spec.args, spec.console
    if console.log is None:  # no log file: DeepSpeed would print between the program's own lines
        silence_prints()

    # 1. The ranks meet: process groups, one checkpoint to resume, one initial model.
    spec, groups, foreign_groups = _meet(spec)
    here, hosts = all_gather_on_host(host_id(), groups.rank), Hosts(tuple(gather_object(host_id())))
    if spec.data.train is not None and spec.parts.output_checks is not None:
        spec.parts.output_checks.require_writable(spec.output_dir, here, groups.rank, console)
    spec, saved = _with_checkpoint(spec)
    if spec.compression is not None and spec.resolved.gradient_bits != 0:
        spec = replace(spec, resolved=spec.compression.settled(spec.resolved, groups, console))
    _warn_of_placement(spec, hosts)
    take_first_ranks(tensors_in_memory(spec.inputs.model, spec.source, spec.adaptation), groups.device, console)

    # 2. The first samples of the data are checked.
    data_check = _data_check(spec, groups)
    sample = _first_samples(data_check, spec)
    _note_other_labels(data_check, sample, console)
    part = spec.parts.data
    if part is not None and spec.source is not None:
        spec = replace(spec, source=part.stop_at_answers(spec.source, spec.data, console))
    # 3. The model as a list of pipeline layers, not built yet: check that it fits, cut it, and estimate its costs.
    prediction = _predicted(spec, groups.device, sample, list(here.values))
    trainable = _trainable(spec, groups, sample)
    if saved is not None:
        saved.require_same_model(trainable.summary, trainable.shaping_config)
    if trainable.causal is not None:  # the vocabulary is now known: check ids against it
        data_check = _for_vocabulary(data_check, spec, trainable.causal.vocab_size)
    for line in [] if part is None else part.sample_lines(spec.data):  # lets the user spot a wrong loss mask
        console.say(line)
    base = all_or_none(lambda: _base_checksums(spec))
    if saved is not None:
        all_or_none(partial(saved.require_same_base, base))
    prompts = all_or_none(lambda: _prompts(spec, trainable))
    boundaries = choose_boundaries(trainable, spec, _measured_costs(spec, trainable, groups.device, sample))
    ACTIVITY.stage_costs = stage_costs(trainable.costs, boundaries, spec.resolved.chunks)

    # 4. The layers of this rank, and DeepSpeed's engine around them.
    if optimizer := all_or_none(lambda: compiled_optimizer(spec.resolved.config, groups.device)):
        console.say(f"optimizer {optimizer} is DeepSpeed's own: its first use here compiles it, which can take minutes")
    engine = build_engine(spec, groups, trainable.layers, boundaries, trainable.loss, trainable.traits)
    stages = stage_lines(trainable, boundaries, engine.deepspeed.module, spec.resolved.chunks, groups)
    if (backend := spec.resolved.compile_backend) is not None:
        console.say(waits_for_compiler(backend, spec.resolved.compile_options))
    report_stages(console, spec.layout, spec.resolved, spec.max_steps, stages)
    _report_given(spec, trainable)
    # The id of a fresh run is random, so rank 0's is broadcast.
    run = Run(
        spec=spec,
        groups=groups,
        data_check=data_check,
        trainable=trainable,
        base_checksums=base,
        boundaries=boundaries,
        engine=engine,
        stage_lines=stages,
        foreign_groups=foreign_groups,
        one_host=here.hosts == 1,
        run_id=broadcast_object(run_id(spec.checkpoint)),
        prompts=prompts,
        prediction=prediction,
    )
    malloc_trim()  # DeepSpeed has copied all parameters into flat tensors and freed the originals
    if spec.resolved.zero_stage != 2:  # ZeRO-2's buckets would make this take up to 1.5 times the memory
        keep_freed_memory(groups.device)
    if args.saves:
        _warn_of_full_disk(run, run.engine_state.require_savable())
    if spec.inputs.objective is not None and spec.source is not None:
        data = spec.inputs.objective.before_training(
            engine, spec.data, data_check.collator, spec.source, spec.adaptation, console
        )
        run.spec = replace(spec, data=data)
    run.stream = training_stream(run)
    return run


def _meet(spec: RunSpec) -> tuple[RunSpec, Groups, frozenset[dist.ProcessGroup]]:
    """Meet the other ranks and check that all hold the same config, code, model and data.

    Returns:
        The spec with the checkpoint that all ranks resume, this rank's device and groups, and the process groups that
        were open before the run.
    """
    args, console, env = spec.args, spec.console, spec.inputs.env
    for note in spec.parts.argument_notes(args.without_effect):
        console.say(note)
    # The watchdog needs the process groups, and these need all ranks: until then only stopped processes are looked for.
    THIS_RANK.doing = "waiting for the other ranks"
    with spec.parts.watch.for_stopped_ranks(args.hang_seconds, console):
        device = start(env)
        if spec.args.use_cpu and device.type != "cpu":
            raise UserError("--use_cpu: DeepSpeed has found a GPU already: set DS_ACCELERATOR=cpu in the environment")
        all_or_none(lambda: require_precision(spec.resolved.precision))  # hosts may have different devices
        all_or_none(lambda: require_device(spec.resolved.config, device))
        if spec.parts.output_checks is not None:
            spec.parts.output_checks.require_shared(spec.output_dir, env.rank, env.world_size)
        weights = spec.source.weights if spec.source is not None else None
        check_agreement(
            spec.resolved.config,
            spec.layout,
            others={
                "set of versions (torch, transformers, DeepSpeed)": [
                    package.__version__.partition("+")[0] for package in (torch, transformers, deepspeed)
                ],
                "model config": {} if spec.source is None else shaping(spec.source.config),
                "origin of the weights (files, memory or seed)": type(weights).__name__,
                "set of weight files": all_or_none(lambda: sampled(weights) if isinstance(weights, Path) else {}),
                "set of arguments": {item.name: str(getattr(args, item.name)) for item in fields(args)},
                "training data": spec.data_digest,
                "evaluation data": evaluation_digest(spec.data.evaluation),
                "set of adapters": spec.adapter_fingerprint,
                "objective": spec.inputs.objective_settings,
                "optimizer that was given": "" if spec.user_optimizer is None else spec.user_optimizer.description,
            },
        )
        finds = args.rank_0_finds_checkpoint
        checkpoint = chosen_by_rank_0(lambda: checkpoint_to_resume(spec) if finds else spec.checkpoint)
        all_or_none(lambda: lock_directory(spec.output_dir) if env.rank == 0 else None)
        # `release` closes the groups of this run, but not the groups that were open before it.
        foreign_groups = open_groups()
        groups = build_groups(spec.layout, spec.resolved.chunks.loss_stage, device)
        THIS_RANK.rank = groups.rank
        THIS_RANK.stage = groups.coordinate.stage
        spec.parts.watch.ranks(args, groups, console, on_accelerator=device.type != "cpu")
    if device.type == "cpu" and spec.parts.host_collectives is not None:
        spec.parts.host_collectives(groups)
    if spec.parts.check_config is not None and (warning := spec.parts.check_config.version_warning()):
        console.warn(warning)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    elif device.type == "cuda" and spec.resolved.precision == "fp32":
        console.say("TF32 is off, as in torch: float32 products are exact; --tf32 makes them several times as fast")
    if text := mixed_devices(device):
        console.warn(text)
    return replace(spec, checkpoint=checkpoint), groups, foreign_groups


def _with_checkpoint(spec: RunSpec) -> tuple[RunSpec, SavedRun | None]:
    """Return the spec with the intact checkpoint to resume and the steps left, and the state in that checkpoint."""
    spec = replace(spec, checkpoint=intact_checkpoint(spec, spec.args))
    if spec.checkpoint is None:
        return spec, None
    saved = SavedRun.read(spec.checkpoint)
    return spec if spec.data.train is None else with_steps_left(spec, saved.progress), saved


def _warn_of_placement(spec: RunSpec, hosts: Hosts) -> None:
    """Warn on rank 0, which alone knows the hosts, if tensor-parallel groups cross hosts."""
    advice = spec.parts.placement_advice
    if hosts.ids and advice is not None and (warning := advice(spec.layout, hosts)):
        spec.console.warn(warning)


def _data_check(spec: RunSpec, groups: Groups) -> DatasetCheck:
    """Return the check of the data, not yet with the model's vocabulary."""
    inputs = spec.inputs
    collator = inputs.data_collator
    if spec.source is not None:
        collator = TokenCollator(collator, None, position_limit(spec.source.config))
    return DatasetCheck(
        source=spec.source,
        spec=spec,
        groups=groups,
        collator=collator,
        own_loss=any(own is not None for own in (inputs.loss_fn, inputs.compute_loss_func, inputs.objective)),
        require_packable=spec.parts.require_packable,
    )


def _note_other_labels(check: DatasetCheck, sample: MicroBatch | None, console: Console) -> None:
    """Tell the user how the loss reads labels that are not the tokens."""
    if check.source is not None and sample is not None and not check.own_loss and meaning_of(sample) == OTHERS:
        console.say(
            "labels are neither the tokens nor the next tokens; the loss shifts them: position i predicts label i + 1"
        )


def _for_vocabulary(check: DatasetCheck, spec: RunSpec, size: int) -> DatasetCheck:
    """Check the first samples again with the model's vocabulary; return the check to use from now on."""
    longest = None if check.source is None else position_limit(check.source.config)
    collator = TokenCollator(spec.inputs.data_collator, size, longest, not check.own_loss)
    check = replace(check, collator=collator)
    _first_samples(check, spec)
    return check


def _first_samples(check: DatasetCheck, spec: RunSpec) -> MicroBatch | None:
    """Check the first samples of all data sets; return a micro-batch of the training data."""
    micro_batch = spec.resolved.micro_batch
    for name, evaluation in by_prefix(spec.data.evaluation, "eval_dataset").items():
        if not dataset_length(evaluation):
            raise UserError(f"{name} is empty: give at least one sample, or no data set")
        check.first_batch(evaluation, spec.args.per_device_eval_batch_size or micro_batch)
    return check.first_batch(spec.data.train, micro_batch)


def _predicted(
    spec: RunSpec, device: torch.device, sample: MicroBatch | None, ranks: Sequence[int]
) -> RunPrediction | None:
    """Predict and report memory and speed; `ranks` are this host's. Raises UserError if the run cannot fit."""
    forecast = spec.parts.forecast
    if forecast is None or spec.source is None or spec.data.train is None:
        return None
    found = forecast(
        spec.source,
        spec.resolved,
        spec.layout,
        spec.args,
        length=sample_length(sample),
        device=device,
        ranks=ranks,
        adapters=spec.adaptation is not None,
        sequences=1 if spec.inputs.objective is None else spec.inputs.objective.sequences,
    )
    if found is None:
        return None
    spec.console.say(str(found))
    if not spec.args.skip_memory_check:
        # Each host checks its own ranks: if one refuses, all ranks stop, or they would wait for it in a collective.
        warning = all_or_none(found.require_memory)
        if warning is not None:
            spec.console.warn(warning)
    return found


def _trainable(spec: RunSpec, groups: Groups, sample: MicroBatch | None) -> TrainableModel:
    """Return the model as pipeline layers; verify its sharding on a tiny copy if the arguments ask for it."""
    if spec.source is None:
        trainable = trainable_layers(cast("Sequence[Layer]", spec.inputs.model), spec.inputs.loss_fn, sample)
    else:
        report_origin(spec.console, spec.source, spec.args.seed)
        own_loss = logits_loss(spec.inputs.loss_fn, spec.inputs.compute_loss_func, spec.args.label_smoothing_factor)
        trainable = trainable_decoder(
            spec.source, spec, groups, sample_length(sample), spec.adaptation, own_loss, parts=spec.parts
        )
        if spec.inputs.objective is not None:
            loss = partial(spec.inputs.objective.loss, data_group=groups.dp_group)
            trainable = replace(trainable, loss=with_objective(trainable.loss, loss))
    if spec.resolved.compile_backend is not None:
        require_compilable(trainable, spec.resolved.compile_backend, spec.resolved.compile_options)
    if trainable.causal is not None:
        verify_sharding = spec.parts.verify_sharding
        if spec.args.verify_plan == "on":
            verify_sharding = needed(verify_sharding, "--verify_plan on", "harness.verify")
        if verify_sharding is not None:
            verify_sharding(trainable.causal, spec, groups, spec.console)
    if isinstance(spec.data.train, SeveralSources):
        return replace(trainable, loss=reporting_sources(trainable.loss, spec.data.train.short_names))
    return trainable


def _measured_costs(
    spec: RunSpec, trainable: TrainableModel, device: torch.device, sample: MicroBatch | None
) -> list[float] | None:
    """Return the measured cost of each layer, if the config asks for it and there is data for it; all ranks call it."""
    if spec.resolved.partition != "measured" or spec.resolved.chunks.count == 1 or sample is None:
        return None
    measure = needed(spec.parts.measure_layers, "pipeline.partition measured", "harness.extras")
    return measure(trainable, spec, device, *sample)


def _prompts(spec: RunSpec, trainable: TrainableModel) -> SamplePrompts | None:
    """Return the prompts of `--sample_prompts`, or None. Raises UserError if the model cannot take them."""
    if spec.args.sample_prompts is None:
        return None
    part, causal = spec.parts.data, trainable.causal
    # `plan_run` has refused the flag without the data part, and for a list of layers.
    assert part is not None and causal is not None
    return part.sample_prompts(spec.args, spec.data, causal.source, causal.vocab_size)


def report_origin(console: Console, source: ModelSource, seed: int) -> None:
    """Tell the user that a model is initialised from the seed, because its directory holds no weights."""
    if source.weights is None and source.name not in presets() and Path(source.name).is_dir():
        console.say(
            f"no weights found (safetensors or pytorch_model.bin) in {source.name}: initialising from seed {seed}"
        )


def _report_given(spec: RunSpec, trainable: TrainableModel) -> None:
    """Report the user's optimizer, the chosen kernels, and how many parameters the adapters train."""
    if trainable.kernels:
        spec.console.say(f"  {trainable.kernels}")
    if spec.user_optimizer is not None:
        spec.console.say(f"  {spec.user_optimizer.summary}, as given: the arguments' own have no effect")
    if spec.adaptation is not None:
        of_all = f"{trainable.size(trained=True):,} of {trainable.size():,} parameters are trained"
        spec.console.say(f"  adapters of rank {spec.adaptation.rank}: {of_all}")


def _base_checksums(spec: RunSpec) -> dict[str, str]:
    """Return the checksums of the adapters' base model; {} except on rank 0, which saves them."""
    if spec.source is None or spec.adaptation is None or spec.inputs.env.rank > 0:
        return {}
    return spec.adaptation.base_checksums(spec.source)


def _warn_of_full_disk(run: Run, states: Sequence[str]) -> None:
    """Warn if a checkpoint does not fit on the disk. `states` names the optimizer's states of each weight."""
    stored = run.trainable.size(trained=run.spec.adaptation is not None)
    kept = 0 if run.spec.args.save_only_model else len(states) * run.trainable.size(trained=True)
    needed = (stored + kept) * torch.float32.itemsize
    with suppress(OSError):
        disk = shutil.disk_usage(run.spec.output_dir)
        if run.spec.inputs.env.rank == 0 and disk.total and needed > disk.free:  # ramfs and others report a size of 0
            run.console.warn(f"a checkpoint takes about {needed:,} bytes, {room(run.spec.output_dir)}: saves will fail")


def training_stream(run: Run) -> BatchStream | None:
    """Return the stream of this rank's training samples, at its start; None without training data."""
    if run.spec.data.train is None:
        return None
    read_ahead, workers = None, run.spec.args.dataloader_num_workers
    if workers and run.engine.reads_data:
        read_ahead = partial(
            needed(run.spec.parts.read_ahead, "--dataloader_num_workers", "harness.extras"), workers=workers
        )
    stream = BatchStream(
        run.spec.data.train,
        seed=run.spec.args.order_seed,
        micro_batch=run.spec.resolved.micro_batch,
        accumulation=run.spec.resolved.accumulation,
        batch_rank=run.groups.coordinate.batch_rank,
        batch_ranks=run.spec.layout.batch_ranks,
        data_collator=run.data_check.collator,
        one_length=run.engine.needs_one_length,
        read_ahead=read_ahead,
    )
    # The same list object, so that the stream skips whatever a resume or a rollback adds.
    stream.skipped = run.state.skipped_samples
    report_padding(run.console, stream.padding_share(), packed=run.spec.args.packing)
    return stream


def report_padding(console: Console, share: float, *, packed: bool) -> None:
    """Suggest packing if most tokens of the first batches are padding."""
    if share > 0.5 and not packed:
        console.say(f"{share:.0%} of the tokens of a batch are padding: --packing joins short conversations instead")


def release(run: Run) -> None:
    """Free the engine's memory and close the run's process groups. A second call does nothing."""
    if not vars(run.engine.deepspeed):  # already released: open groups may belong to another run
        return
    ACTIVITY.stop_watching()
    run.engine.release()
    leave_memory()
    close_groups(run.foreign_groups)
    unlock_directory(run.spec.output_dir)
