"""From what a program hands to the Trainer to one frozen record of the run, before the first step.

What can be refused without other ranks is refused first (`plan.py`); then all ranks meet and compare what they are
about to do; only then a model is built.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import cast

import torch
import torch.distributed as dist

from harness.checkpoint import directories
from harness.checkpoint.atomic import room
from harness.checkpoint.integrity import run_id
from harness.checkpoint.run_lock import lock_directory, unlock_directory
from harness.checkpoint.training_state import require_savable
from harness.checkpoint.trial import try_saving
from harness.data.batches.collate import MicroBatch, TokenCollator
from harness.data.batches.evaluation import by_prefix, evaluation_digest
from harness.data.batches.stream import BatchStream
from harness.deepspeed.collectives import carry_collectives
from harness.deepspeed.pipeline import Layer
from harness.deepspeed.prints import silence_prints
from harness.hf.lora import base_checksums
from harness.hf.skeleton import position_limit
from harness.parallel.collectives.of_group import (
    gathers_in_memory,
    leave_memory,
    means_in_memory,
    scatters_in_memory,
    share_memory,
    sums_in_memory,
)
from harness.parallel.memory import keep_freed_memory, malloc_trim
from harness.resilience.process.activity import ACTIVITY, expect_costs
from harness.resilience.process.distributed import close_groups, open_groups, require_device, require_precision, start
from harness.resilience.process.records import THIS_RANK
from harness.resilience.watch.meeting import watching_for_stopped_ranks
from harness.resilience.watch.watcher import watch_run
from harness.topology.agreement import all_or_none, check_agreement, values_of_all
from harness.topology.groups import build_groups
from harness.topology.placement import Hosts, host_id
from harness.training.engine.build import build_engine
from harness.training.engine.context import EngineContext
from harness.training.engine.engine import Engine
from harness.training.engine.gradients import settle_compression
from harness.training.engine.losses import logits_loss
from harness.training.prepare import startup_report
from harness.training.prepare.compilation import require_compilable
from harness.training.prepare.dataset_check import OTHERS, DatasetCheck, meaning_of, sample_length
from harness.training.prepare.forecast import Forecast, forecast, require_memory
from harness.training.prepare.hyperparameters import hyperparameters
from harness.training.prepare.one_model import take_first_ranks, tensors_in_memory
from harness.training.prepare.plan import RunInputs, RunPlan, intact_checkpoint, plan_run
from harness.training.prepare.sample_prompts import sample_prompts
from harness.training.prepare.shared_output import require_shared
from harness.training.prepare.stages import choose_boundaries, stage_costs, stage_lines
from harness.training.prepare.trainable import TrainableModel, trainable_decoder, trainable_layers
from harness.training.prepare.verification import verify_plan
from harness.training.run import Run


def prepare_run(inputs: RunInputs) -> Run:
    """Prepare everything that training needs; all ranks call it. Raises UserError for what the user can correct."""
    plan = plan_run(inputs)
    args, console = plan.args, plan.console
    if console.log is None:  # nothing keeps DeepSpeed's words apart from the program's own
        silence_prints()
    context, foreign_groups = _join(plan)
    hosts = Hosts(tuple(values_of_all(host_id())))
    plan.resolved = context.resolved
    if plan.data.train is not None:
        try_saving(plan.output_dir, several_hosts=len(hosts.names) > 1)
    plan.checkpoint = intact_checkpoint(plan, args)
    startup_report.placement(console, plan.layout, hosts)
    take_first_ranks(tensors_in_memory(plan.model, plan.source, plan.adaptation), context.device, console)
    longest = None if plan.source is None else position_limit(plan.source.config)
    collator = plan.data_collator if plan.source is None else TokenCollator(plan.data_collator, None, longest)
    own_loss = plan.loss_fn is not None or plan.compute_loss_func is not None
    data_check = DatasetCheck(source=plan.source, context=context, collator=collator, own_loss=own_loss)
    sample = _first_samples(data_check, plan)
    if plan.source is not None and sample is not None and not own_loss and meaning_of(sample) == OTHERS:
        console.say(
            "labels: neither the tokens nor the next tokens; the loss shifts them: position i learns label i + 1"
        )
    startup_report.learnt(console, plan.data)
    expected = _expected(plan, context, sample, hosts.ranks_beside(context.groups.rank))
    trainable = _trainable(plan, context, sample)
    if trainable.causal is not None:  # the vocabulary is known now
        collator = TokenCollator(plan.data_collator, trainable.causal.vocab_size, longest, not own_loss)
        data_check = replace(data_check, collator=collator)
        _first_samples(data_check, plan)
    base = all_or_none(lambda: _base(plan))
    if (checkpoint := plan.checkpoint) is not None:
        all_or_none(lambda: directories.require_same_base(checkpoint, base))
    samples = all_or_none(lambda: sample_prompts(plan, trainable))
    boundaries = choose_boundaries(trainable, context, sample)
    expect_costs(stage_costs(trainable.costs, boundaries, plan.resolved.chunks))
    startup_report.compilation(console, plan.resolved, context.device)
    engine = build_engine(context, trainable.layers, boundaries, trainable.loss, trainable.traits)
    stages = stage_lines(trainable, boundaries, engine.deepspeed.module, context)
    startup_report.stages(console, plan.layout, plan.resolved, plan.max_steps, stages)
    startup_report.adapters(console, plan.adaptation, trainable)
    run = Run(
        **{**vars(plan), **vars(context)},
        data_check=data_check,
        trainable=trainable,
        base=base,
        boundaries=boundaries,
        engine=engine,
        stages=stages,
        hyperparameters=hyperparameters(args, plan.resolved, plan.max_steps),
        foreign_groups=foreign_groups,
        hosts=hosts,
        run_id=values_of_all(run_id(plan.checkpoint))[0],
        samples=samples,
        expected=expected,
    )
    malloc_trim()  # DeepSpeed has copied all parameters into flat tensors
    if run.resolved.zero_stage != 2:  # which would need up to half as much again
        keep_freed_memory(run.device)
    if args.saves:
        _tell_room(run, require_savable(run.engine_state))
    return run


def _tell_room(run: Run, states: Sequence[str]) -> None:
    """Warn if a checkpoint does not fit on the disk. `states`: what the optimizer keeps for each trained weight."""
    stored = run.trainable.size(trained=run.adaptation is not None)
    kept = 0 if run.args.save_only_model else len(states) * run.trainable.size(trained=True)
    needed = (stored + kept) * torch.float32.itemsize
    with suppress(OSError):
        disk = shutil.disk_usage(run.output_dir)
        if run.env.rank == 0 and disk.total and needed > disk.free:  # some file systems, as ramfs, know no size
            run.console.warn(f"a checkpoint takes about {needed:,} bytes, {room(run.output_dir)}: saves will fail")


def _join(plan: RunPlan) -> tuple[EngineContext, frozenset[dist.ProcessGroup]]:
    """Meet the other ranks, and check that all are about to do the same. Also returns the groups open before."""
    args, console, env, data = plan.args, plan.console, plan.env, plan.data
    THIS_RANK.doing = "waiting for the other ranks"
    with watching_for_stopped_ranks(args.hang_seconds, console):
        device = start(env)
        require_precision(plan.resolved.precision)
        require_device(plan.resolved.config, device)
        require_shared(plan.output_dir, env.rank, env.world_size)
        check_agreement(
            plan.resolved.config,
            plan.layout,
            device=device,
            others={
                "set of arguments": {item.name: str(getattr(args, item.name)) for item in fields(args)},
                "training data": plan.digest,
                "evaluation data": evaluation_digest(data.evaluation),
                "set of adapters": plan.adapters,
                "checkpoint to resume": str(plan.checkpoint),
            },
        )
        all_or_none(lambda: lock_directory(plan.output_dir) if env.rank == 0 else None)
        foreign_groups = open_groups()
        groups = build_groups(plan.layout, plan.resolved.chunks.loss_stage)
        THIS_RANK.rank, THIS_RANK.stage = groups.rank, groups.coordinate.stage
        watch_run(args, groups, console)
    if device.type == "cpu":
        share_memory([groups.tp_group, groups.dp_group])
        carry_collectives(sums_in_memory, gathers_in_memory, scatters_in_memory, means_in_memory)
    startup_report.version(console)
    resolved = settle_compression(plan.resolved, groups, device, console)
    context = EngineContext(args=args, resolved=resolved, groups=groups, device=device, max_steps=plan.max_steps)
    return context, foreign_groups


def _base(plan: RunPlan) -> dict[str, str]:
    """Return the checksums of what adapters stand on, on rank 0, which writes them; nothing elsewhere."""
    if plan.source is None or plan.adaptation is None or plan.env.rank > 0:
        return {}
    return base_checksums(plan.source, plan.adaptation.config.modules_to_save or ())


def _expected(
    plan: RunPlan, context: EngineContext, sample: MicroBatch | None, ranks: Sequence[int]
) -> Forecast | None:
    """Return what the planner expects of the run, and say so. UserError for what cannot fit. `ranks`: of this host."""
    if plan.source is None or plan.data.train is None:
        return None
    found = forecast(plan, sample_length(sample), context.device, len(ranks))
    if found is None:
        return None
    plan.console.say(str(found))
    if not plan.args.skip_memory_check:
        warning = all_or_none(lambda: require_memory(found, plan, ranks, context.device))
        if warning is not None:
            plan.console.warn(warning)
    return found


def _first_samples(check: DatasetCheck, plan: RunPlan) -> MicroBatch | None:
    """Return a micro-batch of the training data, after a look at both data sets."""
    micro_batch = plan.resolved.micro_batch
    for evaluation in by_prefix(plan.data.evaluation).values():
        check.first_batch(evaluation, plan.args.per_device_eval_batch_size or micro_batch)
    return check.first_batch(plan.data.train, micro_batch)


def _trainable(plan: RunPlan, context: EngineContext, sample: MicroBatch | None) -> TrainableModel:
    """Return the model as pipeline layers, verified on a tiny copy where that is asked for."""
    if plan.source is None:
        trainable = trainable_layers(cast("Sequence[Layer]", plan.model), plan.loss_fn, sample)
    else:
        startup_report.origin(plan.console, plan.source, plan.args.seed)
        own_loss = logits_loss(plan.loss_fn, plan.compute_loss_func, plan.args.label_smoothing_factor)
        trainable = trainable_decoder(plan.source, context, sample_length(sample), plan.adaptation, own_loss)
    if context.resolved.compile_backend is not None:
        require_compilable(trainable, context.resolved.compile_backend)
    if trainable.causal is not None:
        verify_plan(trainable.causal, context, plan.console)
    if plan.checkpoint is not None:
        directories.require_same_model(plan.checkpoint, trainable.summary, trainable.shaping_config)
    return trainable


def training_stream(run: Run) -> BatchStream | None:
    """Return the training samples of this rank's data-parallel coordinate, from the first one on; None without data."""
    if run.data.train is None:
        return None
    stream = BatchStream(
        run.data.train,
        seed=run.args.seed,
        micro_batch=run.resolved.micro_batch,
        accumulation=run.resolved.accumulation,
        dp_rank=run.groups.coordinate.dp_rank,
        dp_size=run.layout.dp_size,
        data_collator=run.data_check.collator,
        one_length=run.engine.needs_one_length,
        workers=run.args.dataloader_num_workers if run.engine.reads_data else 0,
    )
    startup_report.padding(run.console, stream.padding_share(), packed=run.args.packing)
    return stream


def release(run: Run) -> None:
    """Let go of the engine's memory and of the process groups that were opened for the run; once is enough."""
    if not vars(run.engine.deepspeed):  # let go of before: the groups that are open now are another run's
        return
    ACTIVITY.stop_watching()
    release_engine(run.engine)
    leave_memory()
    close_groups(run.foreign_groups)
    unlock_directory(run.output_dir)


def release_engine(engine: Engine) -> None:
    """Let go of an engine's memory; its process groups stay."""
    deepspeed = engine.deepspeed
    deepspeed.destroy()
    for held in (*deepspeed.module.parameters(), deepspeed):
        vars(held).clear()  # hooks of parameters refer to it, which Python cannot tell from a use
    gc.collect()
