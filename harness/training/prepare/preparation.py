"""Prepare a planned run (`plan.py`) for its first step, in the order of this page.

The ranks meet (`meeting.py`) and choose the checkpoint to resume; data and model are checked; the model is cut
into stages; the engine is built.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from harness.atomic import room
from harness.batches.collate import MapDataset, MicroBatch, TokenCollator
from harness.batches.order import SeveralSources
from harness.batches.stream import BatchStream
from harness.checkpoint.integrity import run_id
from harness.checkpoint.resumption import saved_run
from harness.checkpoint.run_lock import unlock_directory
from harness.checkpoint.saved_run import SavedRun
from harness.console import Console
from harness.deepspeed.pipeline import Layer
from harness.deepspeed.process_wide import silence_prints
from harness.device.process_group import close_groups
from harness.hf.layers.attention import with_attention
from harness.hf.locate import presets
from harness.hf.skeleton import ModelSource, position_limit
from harness.parallel.collectives import leave_memory
from harness.parallel.compiling import waits_for_compiler
from harness.parallel.memory import keep_freed_memory, malloc_trim
from harness.resilience.process.activity import ACTIVITY
from harness.topology.agreement import all_or_none, broadcast_object
from harness.topology.groups import Groups
from harness.training.engine.build import build_engine
from harness.training.engine.losses import logits_loss, reporting_sources, with_objective
from harness.training.engine.optimizer import compiled_optimizer
from harness.training.parts import RunPrediction, needed
from harness.training.parts.data import Datasets
from harness.training.prepare.dataset_check import OTHERS, DatasetCheck, meaning_of, sample_length
from harness.training.prepare.meeting import meet
from harness.training.prepare.one_model import take_first_ranks, tensors_in_memory
from harness.training.prepare.plan import RunSpec
from harness.training.prepare.run import Run
from harness.training.prepare.stages import StageLine, choose_boundaries, report_stages, stage_costs, stage_lines
from harness.training.prepare.trainable import TrainableModel, require_compilable, trainable_decoder, trainable_layers


def prepare_run(spec: RunSpec, data: Datasets) -> Run:
    """Prepare everything that training needs; all ranks call it. Raises UserError for what the user can correct."""
    args, console, parts = spec.args, spec.console, spec.parts
    # Without a log file DeepSpeed would print between the program's own lines.
    if console.log is None:
        silence_prints()

    # 1. The ranks meet and settle the specification: from here on it does not change.
    meeting = meet(spec)
    groups, device = meeting.groups, meeting.groups.device
    saved = saved_run(spec.resume_request, console)
    spec = _settled(spec, groups, saved)
    resolved, source, adapters = spec.resolved, spec.source, spec.adaptation
    # Before the checks and the layers below read a model in memory, of which each process has made its own.
    take_first_ranks(tensors_in_memory(spec.inputs.model, source, adapters), device, console)

    # 2. The first samples of the data are checked.
    check = _data_check(spec, groups)
    sample = _first_samples(spec, check, data)

    # 3. The model as a list of pipeline layers, not built yet: check that it fits, cut it, and estimate its costs.
    prediction = _predicted(spec, device, sample, list(meeting.on_host.values))
    trainable = _trainable(spec, groups, sample, data.train)
    if saved is not None:
        saved.require_same_model(trainable.summary, trainable.shaping_config)
    if (causal := trainable.causal) is not None:
        # The vocabulary is known only now: check ids against it.
        check = check.with_vocabulary(causal.vocab_size)
        check.first_batches(data)
    for line in [] if parts.data is None else parts.data.sample_lines(data):  # lets the user spot a wrong loss mask
        console.say(line)
    base = _base_checksums(spec, groups, saved)
    prompts = None
    if args.sample_prompts is not None:
        # `plan_run` has refused the flag without the data part, and for a list of layers.
        assert parts.data is not None and causal is not None
        prompts = all_or_none(partial(parts.data.sample_prompts, args, data, causal.source, causal.vocab_size))
    boundaries = choose_boundaries(trainable, resolved, _measured_costs(spec, trainable, device, sample))
    # The watch compares the ranks' speed: a stage with more layers is not a straggler.
    ACTIVITY.stage_costs = stage_costs(trainable.costs, boundaries, resolved.chunks)

    # 4. The layers of this rank, and DeepSpeed's engine around them.
    if optimizer := all_or_none(lambda: compiled_optimizer(resolved.config, device)):
        console.say(f"optimizer {optimizer} is DeepSpeed's own: its first use here compiles it, which can take minutes")
    engine = build_engine(spec, groups, trainable.layers, boundaries, trainable.loss, trainable.traits)
    stages = stage_lines(trainable, boundaries, engine.deepspeed.module, resolved.chunks, groups)
    _report(spec, trainable, stages)
    checkpoint = None if saved is None else saved.checkpoint
    run = Run(
        spec=spec,
        data=data,
        checkpoint=checkpoint,
        groups=groups,
        data_check=check,
        trainable=trainable,
        base_checksums=base,
        boundaries=boundaries,
        engine=engine,
        stage_lines=stages,
        foreign_groups=meeting.foreign_groups,
        one_host=meeting.on_host.hosts == 1,
        run_id=broadcast_object(run_id(checkpoint)),  # the id of a fresh run is random, so rank 0's is taken
        prompts=prompts,
        prediction=prediction,
    )
    # DeepSpeed has copied all parameters into flat tensors and freed the originals.
    malloc_trim()
    # ZeRO-2's buckets would make this take up to 1.5 times the memory.
    if resolved.zero_stage != 2:
        keep_freed_memory(device)
    if args.saves:
        # An optimizer whose state cannot be saved is refused here, not at the first checkpoint.
        _warn_of_full_disk(run, run.engine_state.require_savable())
    objective = spec.inputs.objective
    if objective is not None and source is not None:
        # While the engine still has the initial weights, with which preferences compare; a checkpoint is loaded later.
        run.data = objective.before_training(engine, data, check.collator, source, adapters, console)
    run.stream = training_stream(run)
    return run


def _base_checksums(spec: RunSpec, groups: Groups, saved: SavedRun | None) -> dict[str, str]:
    """Return the checksums of the adapters' base model on rank 0, which saves them; {} on others and without adapters.

    Raises UserError on all ranks if the saved run has another base model.
    """
    source, adapters = spec.source, spec.adaptation
    base: dict[str, str] = {}
    if source is not None and adapters is not None:
        base = all_or_none(lambda: adapters.base_checksums(source) if groups.rank == 0 else {})
    if saved is not None:
        all_or_none(partial(saved.require_same_base, base))
    return base


def _settled(spec: RunSpec, groups: Groups, saved: SavedRun | None) -> RunSpec:
    """Return the spec with the steps left after a checkpoint, and the measured bits of gradients; all ranks call it."""
    resolved, max_steps = spec.resolved, spec.max_steps
    if saved is not None and spec.samples is not None:
        resolved, max_steps = spec.resolved_at(saved.progress)
    # Last, as `resolved_at` resolves the config anew, in which the bits may be "auto".
    if spec.compression is not None and resolved.gradient_bits != 0:
        resolved = spec.compression.settled(resolved, groups, spec.console)
    return replace(spec, resolved=resolved, max_steps=max_steps)


def _data_check(spec: RunSpec, groups: Groups) -> DatasetCheck:
    """Return the check of the data, not yet with the model's vocabulary."""
    inputs, micro_batch = spec.inputs, spec.resolved.micro_batch
    config, collator = None, inputs.data_collator
    if spec.source is not None:
        config = with_attention(spec.source.config, spec.args.attn_implementation)
        collator = TokenCollator(collator, None, position_limit(config))
    return DatasetCheck(
        config=config,
        layout=spec.layout,
        sequence_parallel=spec.resolved.sequence_parallel,
        micro_batch=micro_batch,
        evaluation_batch=spec.args.per_device_eval_batch_size or micro_batch,
        device=groups.device,
        dtype=spec.dtype,
        collator=collator,
        own_loss=any(own is not None for own in (inputs.loss_fn, inputs.compute_loss_func, inputs.objective)),
        require_packable=spec.parts.require_packable,
    )


def _first_samples(spec: RunSpec, check: DatasetCheck, data: Datasets) -> MicroBatch | None:
    sample = check.first_batches(data)
    if spec.source is not None and sample is not None and not check.own_loss and meaning_of(sample) == OTHERS:
        spec.console.say(
            "labels are neither the tokens nor the next tokens; the loss shifts them: position i predicts label i + 1"
        )
    return sample


def _predicted(
    spec: RunSpec, device: torch.device, sample: MicroBatch | None, ranks: Sequence[int]
) -> RunPrediction | None:
    """Predict and report memory and speed; `ranks` are this host's. Raises UserError if the run cannot fit."""
    forecast = spec.parts.forecast
    if forecast is None or spec.source is None or spec.samples is None:
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


def _trainable(spec: RunSpec, groups: Groups, sample: MicroBatch | None, data: MapDataset | None) -> TrainableModel:
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
    if isinstance(data, SeveralSources):
        return replace(trainable, loss=reporting_sources(trainable.loss, data.short_names))
    return trainable


def _measured_costs(
    spec: RunSpec, trainable: TrainableModel, device: torch.device, sample: MicroBatch | None
) -> list[float] | None:
    """Return the measured cost of each layer, if the config asks for it and there is data for it; all ranks call it."""
    if spec.resolved.partition != "measured" or spec.resolved.chunks.count == 1 or sample is None:
        return None
    measure = needed(spec.parts.measure_layers, "pipeline.partition measured", "harness.extras")
    return measure(trainable, spec, device, *sample)


def report_origin(console: Console, source: ModelSource, seed: int) -> None:
    """Tell the user that a model is initialised from the seed, because its directory holds no weights."""
    if source.weights is None and source.name not in presets() and Path(source.name).is_dir():
        console.say(
            f"no weights found (safetensors or pytorch_model.bin) in {source.name}: initialising from seed {seed}"
        )


def _report(spec: RunSpec, trainable: TrainableModel, stages: Sequence[StageLine]) -> None:
    if (backend := spec.resolved.compile_backend) is not None:
        spec.console.say(waits_for_compiler(backend, spec.resolved.compile_options))
    report_stages(spec.console, spec.layout, spec.resolved, spec.max_steps, stages)
    if trainable.kernels:
        spec.console.say(f"  {trainable.kernels}")
    if spec.user_optimizer is not None:
        spec.console.say(f"  {spec.user_optimizer.summary}, as given: the arguments' own have no effect")
    if spec.adaptation is not None:
        of_all = f"{trainable.size(trained=True):,} of {trainable.size():,} parameters are trained"
        spec.console.say(f"  adapters of rank {spec.adaptation.rank}: {of_all}")


def _warn_of_full_disk(run: Run, states: Sequence[str]) -> None:
    """Warn if a checkpoint does not fit on the disk. `states` names the optimizer's states of each weight."""
    stored = run.trainable.size(trained=run.spec.adaptation is not None)
    kept = 0 if run.spec.args.save_only_model else len(states) * run.trainable.size(trained=True)
    # Trained weights and states are stored in float32 in every precision.
    needed = (stored + kept) * torch.float32.itemsize
    with suppress(OSError):
        disk = shutil.disk_usage(run.spec.output_dir)
        # ramfs and others report a size of 0.
        if run.spec.inputs.env.rank == 0 and disk.total and needed > disk.free:
            run.console.warn(f"a checkpoint takes about {needed:,} bytes, {room(run.spec.output_dir)}: saves will fail")


def training_stream(run: Run) -> BatchStream | None:
    """Return the stream of this rank's training samples, at its start; None without training data."""
    if run.data.train is None:
        return None
    read_ahead, workers = None, run.spec.args.dataloader_num_workers
    if workers and run.engine.reads_data:
        read_ahead = partial(
            needed(run.spec.parts.read_ahead, "--dataloader_num_workers", "harness.extras"), workers=workers
        )
    stream = BatchStream(
        run.data.train,
        seed=run.spec.args.order_seed,
        micro_batch=run.spec.resolved.micro_batch,
        accumulation=run.spec.resolved.accumulation,
        batch_rank=run.groups.coordinate.batch_rank,
        batch_ranks=run.spec.layout.batch_ranks,
        data_collator=run.data_check.collator,
        # See `batches/padding.py`: what else depends on the padded length.
        one_length=run.spec.layout.pp_size > 1 or run.engine.keys is not None or run.engine.has_router_loss,
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
    # Already released, and the open groups may belong to another run.
    if not vars(run.engine.deepspeed):
        return
    # First, as its thread reads the store of the process group to see other hosts.
    ACTIVITY.stop_watching()
    run.engine.release()
    leave_memory()
    close_groups(run.foreign_groups)
    unlock_directory(run.spec.output_dir)
