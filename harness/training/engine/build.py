"""Build an engine that trains from a resolved config and a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from harness.arguments.themes.intervals import interval
from harness.arguments.themes.reporting import MONITORS, within
from harness.config.values.gradient_sums import bucket_size
from harness.config.values.idle_keys import without_idle
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets
from harness.deepspeed.expert_groups import mark_experts, set_expert_groups
from harness.deepspeed.initialize import initialize
from harness.deepspeed.pipeline import Layer, LayerCall
from harness.deepspeed.process_wide import MpuAdapter, set_secondary_group
from harness.deepspeed.schedule import announcer
from harness.deepspeed.update import Compression, StagedEngine, UpdateParts, WholeEngine
from harness.deepspeed.zero3_parameters import PartitionInPlace
from harness.device.process_group import give_timeout, open_groups
from harness.errors import UserError
from harness.hf.decoder import ModelLayer
from harness.hf.layers.facts import leaves_of_sequence
from harness.parallel.comm import TensorParallel
from harness.parallel.compiling import compile_modules
from harness.parallel.dropout import RngKeys
from harness.parallel.host import reading
from harness.parallel.memory import malloc_trim
from harness.parallel.pipeline.instructions import make_schedule
from harness.parallel.pipeline.staged_module import LayerSequence, StagedModule, deepspeed_topology, first_names
from harness.parallel.tensor.layers import overlap_sums
from harness.parallel.tensor.partial_gradients import defer_sums, sum_once, sums_gradient
from harness.parallel.tensor.shard import shard_of
from harness.parallel.values import Value
from harness.parallel.zero import Zero3Partition, copy_hooked_inputs
from harness.resilience.process.activity import beat
from harness.topology.env import run_timeout
from harness.topology.groups import Groups
from harness.training.engine.engine import Engine, PipelineStages, WholeModel
from harness.training.engine.losses import GuardedLoss, Loss
from harness.training.engine.optimizer import (
    NeedsEngine,
    ParameterGroup,
    in_buckets,
    learning_rate_schedule,
    made_here,
    makes_torchs_class,
    own_optimizer,
    parameter_groups,
    torchs_options,
)
from harness.training.engine.spec import EngineSpec, LayerTraits, has_flat_sums


def build_engine(
    spec: EngineSpec,
    groups: Groups,
    layers: Sequence[Layer],
    boundaries: Sequence[int],
    loss: Loss,
    traits: LayerTraits,
) -> Engine:
    """Build this rank's layers and the DeepSpeed engine around them; all ranks call it.

    Args:
        layers: all layers of the model, not built yet.
        boundaries: index of the first layer of each stage or model chunk, followed by the number of layers.

    Raises:
        UserError: the config does not work with these layers.
    """
    config = deepspeed_config(spec, groups.device)
    if traits.local_states and groups.tp_group is not None:
        config = _without_partitioned_activations(config)
    guarded = GuardedLoss(loss, spoils=spec.args.nonfinite != "warn", tiles=traits.tiles)
    keys = None
    if traits.uses_rng:
        keys = RngKeys(
            seed=spec.args.seed,
            micro_batch=spec.resolved.micro_batch,
            batch_rank=groups.coordinate.batch_rank,
            batch_ranks=groups.layout.batch_ranks,
            tensor=TensorParallel.of(groups.tp_group),
            device=groups.device,
        )
    # DeepSpeed's own groups, opened from here on, have its default timeout: below they get the run's.
    groups_before = open_groups()
    module, grid = _build_module(spec, groups, layers, boundaries, guarded, keys, traits.example)
    if spec.resolved.compile_backend is not None:
        compile_modules(compiled_parts(module), backend=spec.resolved.compile_backend, **spec.resolved.compile_options)
    _configure_checkpointing(spec, groups)
    engine, compression = _initialize(spec, groups, config, module, grid, first_names(layers))
    give_timeout(open_groups() - groups_before)
    # All ranks have built their layers from the same seed. From now on data ranks and stages must draw differently, but
    # tensor-parallel ranks alike: they hold the same hidden states. 1000 exceeds the number of data ranks, usually.
    coordinate = groups.coordinate
    torch.manual_seed(spec.args.seed + coordinate.dp_rank + 1000 * coordinate.stage)
    _prepare(engine, module, spec, groups, traits)
    kind = PipelineStages if spec.is_pipeline else WholeModel
    return kind(engine, spec, groups, guarded, keys, compression)


def _initialize(
    spec: EngineSpec,
    groups: Groups,
    config: JsonObject,
    module: nn.Module,
    grid: PipelineParallelGrid | None,
    names: Mapping[str, str],
) -> tuple[DeepSpeedEngine, Compression | None]:
    """Build DeepSpeed's engine with the run's optimizer and learning-rate schedule.

    Also returns the compressed reduction of its gradients; None without compression.

    `names` come from `first_names`: a tied weight must be in the same parameter group on every stage.
    """
    resolved = spec.resolved
    # Experts that differ between data-parallel ranks. Before the parameter groups are made, which keep them apart.
    mark_experts([p for p in module.parameters() if (shard := shard_of(p)) is not None and shard.over_data])
    set_expert_groups(groups.ep_group, groups.ep_copies)
    optimized, optimizer, schedule = _optimization(spec, groups, config, module, names)
    build: Callable[..., DeepSpeedEngine] = partial(
        WholeEngine, skips_nonfinite=spec.args.nonfinite != "warn", reduces_once=resolved.reduces_once
    )
    compression: Compression | None = None
    if isinstance(module, StagedModule):
        if spec.compression is not None and resolved.gradient_bits:
            compression = spec.compression.reduction(module, groups, resolved.gradient_bits)
        build = _staged(spec, groups, module, compression)
    engine = initialize(
        build,
        zero_stage=resolved.zero_stage,
        model=module,
        model_parameters=optimized,
        optimizer=optimizer,
        lr_scheduler=schedule,
        mpu=grid,
        config=config,
        # The process group is open.
        dist_init_required=False,
    )
    return engine, compression


def _optimization(
    spec: EngineSpec, groups: Groups, config: JsonObject, module: nn.Module, names: Mapping[str, str]
) -> tuple[list[ParameterGroup], Optimizer | None, Callable[[Optimizer], object] | None]:
    """Return the parameter groups, their optimizer, and a function that makes its schedule.

    Optimizer and schedule are None if `config` names them, so that DeepSpeed itself makes them.
    """
    user = spec.user_optimizer
    args = spec.args
    resolved = spec.resolved
    if user is None:
        stated = config.get("optimizer", {}).get("params", {}).get("weight_decay", args.weight_decay)
        parameters = parameter_groups(module, stated, names)
    else:
        parameters = user.groups(module, names)
    if has_flat_sums(resolved) and groups.dp_group is not None:
        # A group is reduced as a whole, so smaller groups let the reduction begin during the backward pass.
        elements = sum(parameter.numel() for group in parameters for parameter in group["params"])
        asked = resolved.config.get("zero_optimization", {}).get("reduce_bucket_size")
        parameters = in_buckets(parameters, bucket_size(asked, elements))
    schedule = None if "scheduler" in config else learning_rate_schedule(args, spec.max_steps)
    if user is not None:
        return parameters, user.made_for(parameters), schedule and user.schedule(schedule)
    return parameters, own_optimizer(config, module, parameters, args, groups.device, names), schedule


def _staged(
    spec: EngineSpec, groups: Groups, module: StagedModule, compression: Compression | None
) -> Callable[..., DeepSpeedEngine]:
    """Return a function that builds the engine of this rank's stage from the arguments of DeepSpeed's engine."""
    resolved = spec.resolved
    parameters = list(module.parameters())
    # Partial gradients of tensor-parallel ranks are summed once a step, not in each backward pass.
    defer_sums(parameters)
    parts = UpdateParts(
        groups=groups,
        sum_partial=partial(sum_once, parameters),
        is_partial=sums_gradient,
        skips_nonfinite=spec.args.nonfinite != "warn",
        overlaps=resolved.config.get("zero_optimization", {}).get("overlap_comm") is not False,
        compression=compression,
        reading=reading,
    )
    stage = groups.coordinate.stage
    schedule = make_schedule(module, resolved.schedule, resolved.chunks, stage, resolved.accumulation)
    return partial(StagedEngine, parts, schedule)


def _prepare(engine: DeepSpeedEngine, module: nn.Module, spec: EngineSpec, groups: Groups, traits: LayerTraits) -> None:
    """Prepare a new engine and its layers for training; all ranks call it."""
    # The torch optimizer inside DeepSpeed's, to which ZeRO gives flat tensors in place of parameters.
    if isinstance(engine.basic_optimizer, NeedsEngine):
        engine.basic_optimizer.attach(engine, groups)
    if isinstance(engine, StagedEngine):
        # The watchdog finds a hanging rank by its current instruction.
        engine.observe(announcer(beat))
        if groups.device.type != "cpu":
            # A tensor-parallel all-reduce can overlap with the computation of weight gradients. Not on a CPU: there the
            # same cores compute and sum, and a step took 1.04 times as long.
            overlap_sums(module)
    if isinstance(module, LayerSequence):
        # ZeRO-2 and ZeRO-3 engines have no pipeline instructions to report within a step.
        announce_layers(module.calls)
        if spec.resolved.zero_stage == 3 and traits.uses_rng:
            # ZeRO-3's hooks replace a layer's inputs by views, which autograd forbids dropout to change in place.
            copy_hooked_inputs(module)


def announce_layers(calls: Sequence[LayerCall]) -> None:
    """Report the start of each layer's forward and backward as progress."""
    for index, call in enumerate(calls):
        if isinstance(call, nn.Module):
            call.register_forward_pre_hook(partial(_forward, f"forward of layer {index}"))
            call.register_forward_hook(partial(_backward, f"backward of layer {index}"))


def _forward(doing: str, _layer: nn.Module, _inputs: object) -> None:
    beat(doing)


def _backward(doing: str, _layer: nn.Module, _inputs: object, output: object) -> None:
    # A layer's backward begins when the gradient of its output arrives.
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _gradient: beat(doing))
            return


def _build_module(
    spec: EngineSpec,
    groups: Groups,
    layers: Sequence[Layer],
    boundaries: Sequence[int],
    loss: GuardedLoss,
    keys: RngKeys | None,
    example: Value | None,
) -> tuple[nn.Module, PipelineParallelGrid | None]:
    """Build this rank's layers and, without a pipeline, the grid that gives DeepSpeed its process groups."""
    interval = spec.resolved.activation_checkpoint_interval
    seed = spec.args.seed
    layout = groups.layout
    if spec.is_pipeline:
        staged = StagedModule(
            layers,
            layout=layout,
            boundaries=boundaries,
            chunks=spec.resolved.chunks,
            loss_fn=loss,
            checkpoint_interval=interval,
            seed=seed,
            keys=keys,
        )
        return staged, None
    # Without a grid as its `mpu`, DeepSpeed would take all ranks for data ranks, tensor-parallel ranks too.
    grid = PipelineParallelGrid(topology=deepspeed_topology(layout), process_group=dist.group.WORLD)
    whole = LayerSequence(layers, checkpoint_interval=interval, seed=seed, keys=keys)
    if spec.resolved.zero_stage == 3 and example is not None:
        mark_leaves(whole, leaves_of_sequence(whole, whole.calls, example))
    return whole, grid


def compiled_parts(module: nn.Module) -> list[nn.Module]:
    """Return the submodules for torch.compile: the decoder layers, or parts of them."""
    layers: Sequence[object] = module.calls if isinstance(module, LayerSequence) else []
    if isinstance(module, StagedModule):
        layers = [call for _, call in module.indexed_layers()]
    return [part for layer in layers if isinstance(layer, ModelLayer) for part in layer.compiled_parts()]


def _without_partitioned_activations(config: JsonObject) -> JsonObject:
    """Switch off DeepSpeed's options that assume equal activations on all tensor-parallel ranks.

    Raises UserError for partition_activations.
    """
    if config.get("activation_checkpointing", {}).get("partition_activations", False):
        raise UserError(
            "activation_checkpointing.partition_activations: this model's layers pass on tensors that differ between "
            "tensor-parallel ranks: remove it"
        )
    # By default DeepSpeed partitions the tensors that stages exchange.
    whole = {"pipe_partitioned": False, "grad_partitioned": False}
    return {**config, "pipeline": {**config.get("pipeline", {}), **whole}}


def _configure_checkpointing(spec: EngineSpec, groups: Groups) -> None:
    """Pass the section `activation_checkpointing` to DeepSpeed; only tensor-parallel ranks partition activations."""
    section = spec.resolved.config.get("activation_checkpointing", {})
    partitioned = section.get("partition_activations", False) and groups.tp_group is not None
    # False, not None, for what is off: DeepSpeed keeps the options in globals, where an earlier run may have set them.
    checkpointing.configure(
        MpuAdapter(groups.coordinate.tp_rank, groups.layout.tp_size, groups.tp_group),
        partition_activations=partitioned,
        # DeepSpeed asserts partitioned activations for this one.
        contiguous_checkpointing=section.get("contiguous_memory_optimization", False) and partitioned,
        num_checkpoints=section.get("number_checkpoints"),
        # On a CPU they would be copied within the same memory.
        checkpoint_in_cpu=section.get("cpu_checkpointing", False) and groups.device.type != "cpu",
        synchronize=section.get("synchronize_checkpoint_boundary", False),
        profile=section.get("profile", False),
    )


def mark_leaves(module: nn.Module, names: Iterable[str]) -> None:
    # ZeRO-3 gathers the parameters of a leaf together. One by one, ranks whose tokens choose other experts would gather
    # in different orders, and hang.
    for name in names:
        set_z3_leaf_module(module.get_submodule(name), True)


def deepspeed_config(spec: EngineSpec, device: torch.device) -> JsonObject:
    """Return the resolved config as DeepSpeed receives it."""
    # Without secrets, because DeepSpeed prints its whole config.
    config = without_idle(Secrets(frozenset()).without(spec.resolved.config))
    # The harness prints the metrics itself: only DeepSpeed's timers need this print.
    if not config.get("steps_per_print"):
        every = interval(spec.args.logging_steps, spec.max_steps)
        # 2**31 for never: DeepSpeed takes step numbers modulo this, in one place even if it is None.
        config["steps_per_print"] = every if config.get("wall_clock_breakdown") else 2**31
        # The throughput timer synchronises with the device.
        if not config.get("wall_clock_breakdown"):
            config.setdefault("timers", {"throughput": {"enabled": False}})
    if device.type == "cpu" and spec.resolved.zero_stage == 3:
        # Contiguous gradients avoid fragmentation of GPU memory; on a CPU they only cost a copy.
        config["zero_optimization"] = {**config["zero_optimization"], "contiguous_gradients": False}
    # DeepSpeed counts context ranks as data ranks, and requires its three batch sizes to agree with their number.
    if spec.resolved.cp_size > 1:
        config["train_batch_size"] *= spec.resolved.cp_size
    # Under ZeRO, DeepSpeed refuses the harness's own optimizers as untested. DS805 checks the user's optimizer.
    config["zero_allow_untested_optimizer"] = True
    # Allow torch's optimizers with offloading: DeepSpeed's CPU optimizers would have to be compiled first.
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    optimizer = config.get("optimizer", {})
    if made_here(config, device):
        config["zero_force_ds_cpu_optimizer"] = False
    if makes_torchs_class(config, device):
        config["optimizer"] = {**optimizer, "params": torchs_options(optimizer.get("params", {}))}
    # The harness writes to the monitors itself.
    for section in MONITORS.values():
        config.pop(section, None)
    if file := config.get("flops_profiler", {}).get("output_file"):
        file = within(spec.args.output_dir, file, "flops_profiler.output_file")
        config["flops_profiler"] = {**config["flops_profiler"], "output_file": file}
    return config


def zero3_partition(spec: EngineSpec, groups: Groups) -> Zero3Partition | None:
    """Return this rank's partition of every parameter under ZeRO-3 without hpZ; None otherwise."""
    if spec.resolved.zero_stage < 3 or secondary_size(spec, groups) > 1:
        return None
    return Zero3Partition(index=groups.coordinate.dp_rank, count=groups.layout.dp_size)


def layer_finisher(spec: EngineSpec, groups: Groups, part: Zero3Partition | None) -> Callable[[nn.Module], None]:
    """Return a function to call on each layer once its weights are loaded: under ZeRO-3 it partitions them.

    Args:
        part: this rank's partition of each parameter, already loaded; with None, whole parameters are broadcast from
            the first rank of the data group.
    """
    if spec.resolved.zero_stage < 3:
        return lambda _: None
    # Leave out the batch sizes: zero.Init would check them against the world size, not the data group's size.
    kept = ("zero_optimization", "bf16", "fp16", "aio")
    config = {name: value for name, value in deepspeed_config(spec, groups.device).items() if name in kept}
    config["train_micro_batch_size_per_gpu"] = 1
    # Each zero.Init would create the secondary group (hpZ) itself; DeepSpeed refuses to do that twice.
    config["zero_optimization"] = {
        **config["zero_optimization"],
        "zero_hpz_partition_size": secondary_size(spec, groups),
    }
    # Without a group zero.Init would partition over all ranks. One of this rank alone is created without the others.
    alone = [dist.get_rank()]
    data_group = groups.dp_group or dist.new_group(alone, timeout=run_timeout(), use_local_synchronization=True)
    secondary = open_secondary_group(spec, groups)

    def partition(layer: Any) -> None:
        mark_leaves(layer, layer.leaves())
        # This call is for its effect on the layer: `zero.Init` partitions the parameters of a given module.
        spread = deepspeed.zero.Init if part is None else PartitionInPlace
        spread(
            module=layer,
            data_parallel_group=data_group,
            config_dict_or_path=config,
            dtype=spec.dtype,
            zero_param_parallel_group=secondary,
        )
        # Each layer is allocated whole and freed again, which would fragment the heap.
        malloc_trim()

    return partition


def secondary_size(spec: EngineSpec, groups: Groups) -> int:
    """Return the number of data-parallel ranks that share a secondary copy of the parameters; 1 without hpZ."""
    size = spec.resolved.config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    return min(int(size), groups.layout.dp_size)


def open_secondary_group(spec: EngineSpec, groups: Groups) -> dist.ProcessGroup | None:
    """Create and return this rank's group for the secondary copy; None without hpZ. All ranks call it."""
    size = secondary_size(spec, groups)
    mine = None
    if size > 1:
        # torch requires every rank to create every group, in the same order.
        for replicas in groups.layout.groups("data"):
            # Consecutive ranks of a data-parallel group. DeepSpeed would take consecutive global ranks, which hold
            # different parameters under pipeline or tensor parallelism.
            for start in range(0, len(replicas), size):
                ranks = list(replicas[start : start + size])
                group = dist.new_group(ranks, timeout=run_timeout())
                mine = group if groups.rank in ranks else mine
    set_secondary_group(mine)
    return mine
