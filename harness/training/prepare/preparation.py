"""Prepare a run for its first step, from the Trainer's arguments.

First each rank alone refuses all that it can (`plan.py`). Then all ranks meet and compare config, code, model
and data. Only then the model is built.
"""

from __future__ import annotations

import shutil
import tempfile
import time
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

from harness.arguments.configure import RunConfig
from harness.atomic import room, sync_folder
from harness.batches.collate import MicroBatch, TokenCollator
from harness.batches.evaluation import by_prefix, evaluation_digest
from harness.batches.order import SeveralSources
from harness.batches.stream import BatchStream, dataset_length
from harness.checkpoint import directories
from harness.checkpoint.integrity import run_id
from harness.checkpoint.run_lock import is_lent_twice, lock_directory, unlock_directory
from harness.checkpoint.trial import try_saving
from harness.console import Console
from harness.deepspeed.collectives import carry_collectives
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
from harness.parallel.collectives import (
    gathers_in_memory,
    leave_memory,
    means_in_memory,
    scatters_in_memory,
    share_memory,
    sums_in_memory,
)
from harness.parallel.compiling import waits_for_compiler
from harness.parallel.memory import keep_freed_memory, malloc_trim
from harness.resilience.process.activity import ACTIVITY
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import (
    HostValues,
    all_or_none,
    any_rank,
    check_agreement,
    spell_ranks,
    value_of_first,
    values_of_all,
    values_on_first,
    values_on_host,
)
from harness.topology.groups import build_groups
from harness.topology.placement import Hosts, advise, host_id, hosts_of_launch
from harness.training.engine.build import build_engine
from harness.training.engine.context import EngineContext
from harness.training.engine.losses import logits_loss, reporting_sources, with_objective
from harness.training.engine.optimizer import compiled_optimizer
from harness.training.parts import RunPrediction, needed
from harness.training.parts.data import SamplePrompts, UserData
from harness.training.prepare.dataset_check import OTHERS, DatasetCheck, meaning_of, sample_length
from harness.training.prepare.one_model import take_first_ranks, tensors_in_memory
from harness.training.prepare.plan import (
    RunInputs,
    RunPlan,
    checkpoint_to_resume,
    chosen_by_rank_0,
    intact_checkpoint,
    plan_run,
    resolve_for,
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


def prepare_run(inputs: RunInputs, given: UserData, config: RunConfig | None = None) -> Run:
    """Prepare everything that training needs; all ranks call it. UserError for anything that the user can correct."""
    # 1. Alone: what needs no other rank, so that a wrong flag fails before the rendezvous.
    plan = plan_run(inputs, given, config)
    args, console = plan.args, plan.console
    if console.log is None:  # no log file: DeepSpeed would print between the program's own lines
        silence_prints()

    # 2. Together: process groups, one checkpoint to resume, one initial model.
    context, foreign_groups = _meet(plan)
    here, hosts = values_on_host(host_id(), context.groups.rank), Hosts(tuple(values_on_first(host_id())))
    plan.resolved = context.resolved
    if plan.data.train is not None:
        try_saving(plan.output_dir, several_hosts=here.hosts > 1)
        _warn_of_locks(plan, here, context.groups.rank)
    plan.checkpoint = intact_checkpoint(plan, args)
    context = _with_steps_left(plan, context)
    if hosts.ids and (advice := advise(plan.layout, hosts_of_launch(hosts), hosts.numbers)):
        console.warn(advice)  # tensor-parallel groups that cross hosts
    take_first_ranks(tensors_in_memory(plan.model, plan.source, plan.adaptation), context.device, console)

    # 3. The data, by its first samples.
    data_check = _data_check(plan, context)
    sample = _first_samples(data_check, plan)
    if plan.source is not None and sample is not None and not data_check.own_loss and meaning_of(sample) == OTHERS:
        console.say(
            "labels are neither the tokens nor the next tokens; the loss shifts them: position i predicts label i + 1"
        )
    part = plan.parts.data
    if part is not None and plan.source is not None:
        plan.source = part.stop_at_answers(plan.source, plan.data, console)
    # 4. The model as a list of pipeline layers, not built yet: check that it fits, cut it, and estimate its costs.
    prediction = _predicted(plan, context, sample, list(here.values))
    trainable = _trainable(plan, context, sample)
    if trainable.causal is not None:  # the vocabulary is known now, so ids are checked against it
        data_check = _for_vocabulary(data_check, plan, trainable.causal.vocab_size)
    for line in [] if part is None else part.sample_lines(plan.data):  # so that the user sees a wrong loss mask
        console.say(line)
    base = all_or_none(lambda: _base_checksums(plan))
    if (checkpoint := plan.checkpoint) is not None:
        all_or_none(lambda: directories.require_same_base(checkpoint, base))
    prompts = all_or_none(lambda: _prompts(plan, trainable))
    boundaries = choose_boundaries(trainable, context, sample)
    ACTIVITY.stage_costs = stage_costs(trainable.costs, boundaries, plan.resolved.chunks)

    # 5. The layers of this rank, and DeepSpeed's engine around them.
    if optimizer := all_or_none(lambda: compiled_optimizer(plan.resolved.config, context.device)):
        console.say(f"optimizer {optimizer} is DeepSpeed's own: its first use here compiles it, which can take minutes")
    engine = build_engine(context, trainable.layers, boundaries, trainable.loss, trainable.traits)
    stages = stage_lines(trainable, boundaries, engine.deepspeed.module, context)
    if (backend := plan.resolved.compile_backend) is not None:
        console.say(waits_for_compiler(backend))
    report_stages(console, plan.layout, plan.resolved, plan.max_steps, stages)
    _report_given(plan, trainable)
    run = Run(
        **{**vars(plan), **vars(context)},
        data_check=data_check,
        trainable=trainable,
        base_checksums=base,
        boundaries=boundaries,
        engine=engine,
        stage_lines=stages,
        foreign_groups=foreign_groups,
        one_host=here.hosts == 1,
        run_id=value_of_first(run_id(plan.checkpoint)),
        prompts=prompts,
        prediction=prediction,
    )
    malloc_trim()  # DeepSpeed has copied all parameters into flat tensors, and freed the originals
    if run.resolved.zero_stage != 2:  # with ZeRO-2's buckets, that would take up to 1.5 times the memory
        keep_freed_memory(run.device)
    if args.saves:
        _warn_of_full_disk(run, run.engine_state.require_savable())
    if plan.objective is not None and plan.source is not None:
        run.data = plan.objective.before_training(
            engine, run.data, data_check.collator, plan.source, plan.adaptation, console
        )
    run.stream = training_stream(run)
    return run


def _meet(plan: RunPlan) -> tuple[EngineContext, frozenset[dist.ProcessGroup]]:
    """Meet the other ranks and check that all hold the same config, code, model and data.

    Returns:
        The inputs for building the engine, and the process groups that were open before the run.
    """
    args, console, env = plan.args, plan.console, plan.env
    for note in plan.parts.argument_notes(args.without_effect):
        console.say(note)
    THIS_RANK.doing = "waiting for the other ranks"
    with plan.parts.watch.for_stopped_ranks(args.hang_seconds, console):
        device = start(env)
        if plan.args.use_cpu and device.type != "cpu":
            raise UserError("--use_cpu: DeepSpeed has found a GPU already: set DS_ACCELERATOR=cpu in the environment")
        all_or_none(lambda: require_precision(plan.resolved.precision))  # hosts may have different devices
        all_or_none(lambda: require_device(plan.resolved.config, device))
        require_shared(plan.output_dir, env.rank, env.world_size)
        weights = plan.source.weights if plan.source is not None else None
        check_agreement(
            plan.resolved.config,
            plan.layout,
            others={
                "set of versions (torch, transformers, DeepSpeed)": [
                    package.__version__.partition("+")[0] for package in (torch, transformers, deepspeed)
                ],
                "model config": {} if plan.source is None else shaping(plan.source.config),
                "origin of the weights (files, memory or seed)": type(weights).__name__,
                "set of weight files": all_or_none(lambda: sampled(weights) if isinstance(weights, Path) else {}),
                "set of arguments": {item.name: str(getattr(args, item.name)) for item in fields(args)},
                "training data": plan.data_digest,
                "evaluation data": evaluation_digest(plan.data.evaluation),
                "set of adapters": plan.adapter_fingerprint,
                "optimizer that was given": "" if plan.user_optimizer is None else plan.user_optimizer.description,
            },
        )
        searches = args.resume_from_checkpoint == "auto"
        plan.checkpoint = chosen_by_rank_0(lambda: checkpoint_to_resume(plan) if searches else plan.checkpoint)
        all_or_none(lambda: lock_directory(plan.output_dir) if env.rank == 0 else None)
        foreign_groups = open_groups()
        groups = build_groups(plan.layout, plan.resolved.chunks.loss_stage)
        THIS_RANK.rank = groups.rank
        THIS_RANK.stage = groups.coordinate.stage
        plan.parts.watch.ranks(args, groups, console, on_accelerator=device.type != "cpu")
    if device.type == "cpu":
        if plan.parts.host_memory is not None:  # several times as fast as gloo
            share_memory([groups.tp_group, groups.dp_group, groups.cp_group, groups.ep_group], plan.parts.host_memory)
        carry_collectives(sums_in_memory, gathers_in_memory, scatters_in_memory, means_in_memory)
    if plan.parts.check_config is not None and (warning := plan.parts.check_config.version_warning()):
        console.warn(warning)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    elif device.type == "cuda" and plan.resolved.precision == "fp32":
        console.say("TF32 is off, as in torch: float32 products are exact; --tf32 makes them several times as fast")
    if text := mixed_devices(device):
        console.warn(text)
    resolved, compression = plan.resolved, None
    if resolved.gradient_bits != 0:
        compression = needed(plan.parts.compression, "gradient_compression", "harness.extras")
        resolved = compression.settled(resolved, groups, device, console)
    context = EngineContext(
        args=args,
        resolved=resolved,
        groups=groups,
        device=device,
        max_steps=plan.max_steps,
        compression=compression,
        user_optimizer=plan.user_optimizer,
    )
    return context, foreign_groups


def _with_steps_left(plan: RunPlan, context: EngineContext) -> EngineContext:
    """Return the context with the number of steps of a resumed run.

    With --num_train_epochs it depends on the samples that are left, because the run that saved may have had another
    global batch.
    """
    if plan.checkpoint is None or plan.data.train is None:
        return context
    samples, progress = dataset_length(plan.data.train), directories.read_progress(plan.checkpoint)
    resolved, plan.max_steps, _ = resolve_for(plan.source, plan.args, plan.config, samples, progress)
    plan.resolved = replace(resolved, gradient_bits=context.resolved.gradient_bits)
    return replace(context, resolved=plan.resolved, max_steps=plan.max_steps)


def _warn_of_locks(plan: RunPlan, here: HostValues[int], rank: int) -> None:
    """Warn if another host can take the lock that rank 0 holds; all ranks call it."""
    looks = min(here.values) == rank and here.number > 0
    if here.hosts > 1 and any_rank(looks and is_lent_twice(plan.output_dir)):
        plan.console.warn(
            f"{plan.output_dir}: file locks are not shared between hosts: a second run on another host is not refused; "
            "this run notices it at its next save"
        )


def _data_check(plan: RunPlan, context: EngineContext) -> DatasetCheck:
    """Return the check of the data; the model's vocabulary is not known yet."""
    longest = None if plan.source is None else position_limit(plan.source.config)
    return DatasetCheck(
        source=plan.source,
        context=context,
        collator=plan.data_collator if plan.source is None else TokenCollator(plan.data_collator, None, longest),
        own_loss=any(own is not None for own in (plan.loss_fn, plan.compute_loss_func, plan.objective)),
        require_packable=plan.parts.require_packable,
    )


def _for_vocabulary(check: DatasetCheck, plan: RunPlan, size: int) -> DatasetCheck:
    """Check the first samples again, now that the model's vocabulary is known; return the check to use from now on."""
    longest = None if check.source is None else position_limit(check.source.config)
    collator = TokenCollator(plan.data_collator, size, longest, not check.own_loss)
    check = replace(check, collator=collator)
    _first_samples(check, plan)
    return check


def _first_samples(check: DatasetCheck, plan: RunPlan) -> MicroBatch | None:
    """Check the first samples of all data sets; return a micro-batch of the training data."""
    micro_batch = plan.resolved.micro_batch
    for name, evaluation in by_prefix(plan.data.evaluation, "eval_dataset").items():
        if not dataset_length(evaluation):
            raise UserError(f"{name} is empty: give at least one sample, or no data set")
        check.first_batch(evaluation, plan.args.per_device_eval_batch_size or micro_batch)
    return check.first_batch(plan.data.train, micro_batch)


def _predicted(
    plan: RunPlan, context: EngineContext, sample: MicroBatch | None, ranks: Sequence[int]
) -> RunPrediction | None:
    """Predict memory and speed, and report it. UserError if the run cannot fit. `ranks` are those of this host."""
    forecast = plan.parts.forecast
    if forecast is None or plan.source is None or plan.data.train is None:
        return None
    found = forecast(
        plan.source,
        plan.resolved,
        plan.layout,
        plan.args,
        length=sample_length(sample),
        device=context.device,
        ranks=ranks,
        adapters=plan.adaptation is not None,
        sequences=1 if plan.objective is None else plan.objective.sequences,
    )
    if found is None:
        return None
    plan.console.say(str(found))
    if not plan.args.skip_memory_check:
        warning = all_or_none(found.require_memory)
        if warning is not None:
            plan.console.warn(warning)
    return found


def _trainable(plan: RunPlan, context: EngineContext, sample: MicroBatch | None) -> TrainableModel:
    """Return the model as pipeline layers; verify its sharding on a tiny copy if the arguments ask for it."""
    if plan.source is None:
        trainable = trainable_layers(cast("Sequence[Layer]", plan.model), plan.loss_fn, sample)
    else:
        report_origin(plan.console, plan.source, plan.args.seed)
        own_loss = logits_loss(plan.loss_fn, plan.compute_loss_func, plan.args.label_smoothing_factor)
        trainable = trainable_decoder(
            plan.source, context, sample_length(sample), plan.adaptation, own_loss, plan.parts.plan_tokens
        )
        if plan.objective is not None:
            loss = partial(plan.objective.loss, data_group=context.groups.dp_group)
            trainable = replace(trainable, loss=with_objective(trainable.loss, loss))
    if context.resolved.compile_backend is not None:
        require_compilable(trainable, context.resolved.compile_backend, context.resolved.compile_options)
    if trainable.causal is not None:
        verify_sharding = plan.parts.verify_sharding
        if plan.args.verify_plan == "on":
            verify_sharding = needed(verify_sharding, "--verify_plan on", "harness.verify")
        if verify_sharding is not None:
            verify_sharding(trainable.causal, context, plan.console)
    if plan.checkpoint is not None:
        directories.require_same_model(plan.checkpoint, trainable.summary, trainable.shaping_config)
    if isinstance(plan.data.train, SeveralSources):
        return replace(trainable, loss=reporting_sources(trainable.loss, plan.data.train.short_names))
    return trainable


def _prompts(plan: RunPlan, trainable: TrainableModel) -> SamplePrompts | None:
    """Return the prompts of `--sample_prompts`, None without any. UserError if the model cannot take them."""
    if plan.args.sample_prompts is None:
        return None
    part, causal = plan.parts.data, trainable.causal
    assert part is not None and causal is not None  # `plan_run` refuses the flag without the part, and for layers
    return part.sample_prompts(plan.args, plan.data, causal.source, causal.vocab_size)


def report_origin(console: Console, source: ModelSource, seed: int) -> None:
    """Tell the user if a model's directory holds no weights, so that it is initialised from the seed."""
    if source.weights is None and source.name not in presets() and Path(source.name).is_dir():
        console.say(
            f"no weights found (safetensors or pytorch_model.bin) in {source.name}: initialising from seed {seed}"
        )


def _report_given(plan: RunPlan, trainable: TrainableModel) -> None:
    """Report the optimizer that the user gave, and how many parameters are trained by adapters."""
    if plan.user_optimizer is not None:
        plan.console.say(f"  {plan.user_optimizer.summary}, as given: the arguments' own have no effect")
    if plan.adaptation is not None:
        of_all = f"{trainable.size(trained=True):,} of {trainable.size():,} parameters are trained"
        plan.console.say(f"  adapters of rank {plan.adaptation.rank}: {of_all}")


def _base_checksums(plan: RunPlan) -> dict[str, str]:
    """Return the checksums of the adapters' base model, on rank 0, which writes them; {} elsewhere."""
    if plan.source is None or plan.adaptation is None or plan.env.rank > 0:
        return {}
    return plan.adaptation.base_checksums(plan.source)


def _warn_of_full_disk(run: Run, states: Sequence[str]) -> None:
    """Warn if a checkpoint does not fit on the disk. `states` are the optimizer's tensors for each trained weight."""
    stored = run.trainable.size(trained=run.adaptation is not None)
    kept = 0 if run.args.save_only_model else len(states) * run.trainable.size(trained=True)
    needed = (stored + kept) * torch.float32.itemsize
    with suppress(OSError):
        disk = shutil.disk_usage(run.output_dir)
        if run.env.rank == 0 and disk.total and needed > disk.free:  # ramfs and others report a size of 0
            run.console.warn(f"a checkpoint takes about {needed:,} bytes, {room(run.output_dir)}: saves will fail")


def training_stream(run: Run) -> BatchStream | None:
    """Return the stream of this rank's training samples, from the first one on; None without training data."""
    if run.data.train is None:
        return None
    stream = BatchStream(
        run.data.train,
        seed=run.args.order_seed,
        micro_batch=run.resolved.micro_batch,
        accumulation=run.resolved.accumulation,
        dp_rank=run.groups.coordinate.reader,
        dp_size=run.layout.readers,
        data_collator=run.data_check.collator,
        one_length=run.engine.needs_one_length,
        workers=run.args.dataloader_num_workers if run.engine.reads_data else 0,
    )
    report_padding(run.console, stream.padding_share(), packed=run.args.packing)
    return stream


def report_padding(console: Console, share: float, *, packed: bool) -> None:
    """Suggest packing if most tokens of the first batches are padding."""
    if share > 0.5 and not packed:
        console.say(f"{share:.0%} of the tokens of a batch are padding: --packing joins short conversations instead")


def release(run: Run) -> None:
    """Free the engine's memory, and close the run's process groups. A second call does nothing."""
    if not vars(run.engine.deepspeed):  # already released: groups that are open now belong to another run
        return
    ACTIVITY.stop_watching()
    run.engine.release()
    leave_memory()
    close_groups(run.foreign_groups)
    unlock_directory(run.output_dir)


PATIENCE_S = 3.0  # network file systems may show a new file with a delay


def require_shared(output_dir: Path, rank: int, world_size: int) -> None:
    """Raise UserError, on all ranks, if one cannot see a file that rank 0 writes to `output_dir`; all ranks call it."""
    if world_size == 1:
        return

    def mark() -> Path | None:
        if rank > 0:
            return None
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir, prefix="shared-", delete=False) as file:
            return Path(file.name)

    marker = value_of_first(all_or_none(mark))
    assert marker is not None
    appears = _appears(output_dir / marker.name)
    is_blind = any_rank(not appears)
    if rank == 0:
        marker.unlink()
    if is_blind:
        seen = values_of_all((THIS_RANK.host, appears))
        blind = [number for number, (_, sees) in enumerate(seen) if not sees]
        raise UserError(
            f"--output_dir {output_dir}: {spell_ranks(blind)} (host {seen[blind[0]][0]}) cannot see what rank 0 (host "
            f"{seen[0][0]}) writes there: give a folder on a file system that all hosts share"
        )


def _appears(path: Path) -> bool:
    """Return whether a file exists, now or within PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        with suppress(OSError):
            sync_folder(path.parent)  # makes an NFS client ask the server again
        time.sleep(0.1)
    return path.exists()
