"""From a resolved config and a list of layers to an engine that trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import set_z3_leaf_module
from torch import nn

from harness.arguments import TrainingArguments
from harness.arguments.themes.reporting import MONITORS, within
from harness.config import Resolved
from harness.config.values.idle_keys import without_idle
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets
from harness.deepspeed.engine import (
    announce_instructions,
    check_every_gradient,
    forget_outputs,
)
from harness.deepspeed.gradient_reduction import (
    give_every_gradient,
    keep_own_gradients,
    reduce_in_place,
    sum_tied_gradients,
)
from harness.deepspeed.kept_in_fp32 import keeping_fp32, reduce_fp32_gradients
from harness.deepspeed.pipeline import Layer
from harness.deepspeed.process_groups import MpuAdapter
from harness.deepspeed.zero3_parameters import restore_linear
from harness.errors import UserError
from harness.hf.decoder import ModelLayer
from harness.hf.layers.zero3_leaves import leaves_of_sequence
from harness.parallel.comm import TensorParallel
from harness.parallel.compiling import compile_modules
from harness.parallel.draws import DrawKeys
from harness.parallel.gradients.compressed import CompressedReduction
from harness.parallel.pipeline.schedules.following import follow_schedule
from harness.parallel.pipeline.staged_module import LayerSequence, StagedModule, deepspeed_topology, first_names
from harness.parallel.tensor.layers import overlap_sums
from harness.parallel.tensor.summed_gradients import put_off_sums, sum_once
from harness.parallel.values import Value
from harness.parallel.zero.in_place_inputs import copy_hooked_inputs
from harness.resilience.process.distributed import give_timeout, open_groups
from harness.resilience.watch.activity import beat
from harness.resilience.watch.layers import announce_layers
from harness.topology.groups import Groups
from harness.training.engine.clipping import correct_clipping
from harness.training.engine.compression import compress_gradients
from harness.training.engine.engine import Engine, PipelineStages, WholeModel
from harness.training.engine.evidence import GuardedLoss
from harness.training.engine.losses import Loss
from harness.training.engine.muon import find_matrices
from harness.training.engine.optimizer import own_optimizer, parameter_groups, schedule
from harness.training.engine.unused import UnusedParameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class EngineContext:
    """Where an engine is built: the run's arguments and config, and this rank's place and device."""

    args: TrainingArguments
    resolved: Resolved
    groups: Groups
    device: torch.device
    max_steps: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return DTYPES[self.resolved.precision]

    @property
    def is_pipeline(self) -> bool:
        """Whether DeepSpeed's pipeline engine drives the run; ZeRO-2 and ZeRO-3 exclude it."""
        return self.resolved.zero_stage < 2


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """What an engine must know of its layers.

    Attributes:
        local_states: whether they hand on tensors that are not the same on all tensor-parallel ranks.
        draws: whether they may draw random numbers in training.
        example: inputs of a micro-batch, for layers of a user's own where there is training data.
    """

    local_states: bool = False
    draws: bool = True
    example: Value | None = None


def build_engine(
    context: EngineContext, layers: Sequence[Layer], boundaries: Sequence[int], loss: Loss, traits: LayerTraits
) -> Engine:
    """Build this rank's layers and the DeepSpeed engine around them; all ranks call it together."""
    config = deepspeed_config(context)
    groups_before = open_groups()
    if context.resolved.zero_stage != 3:
        restore_linear()
    acts = context.args.nonfinite != "warn"
    guarded = GuardedLoss(loss, spoils=acts)
    if traits.local_states and context.groups.tp_group is not None:
        config = _nothing_shared_out(config)
    index = context.device.index  # where a rank sees its own device alone, not its local rank
    keys = draw_keys(context) if traits.draws else None
    module, grid = _build_module(context, layers, boundaries, guarded, keys, traits.example)
    _compile(module, context)
    _configure_checkpointing(context)
    stated = config.get("optimizer", {}).get("params", {}).get("weight_decay", context.args.weight_decay)
    names = first_names(layers)
    groups = parameter_groups(module, stated, names)
    with keeping_fp32():
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace() if index is None else SimpleNamespace(device_rank=index),
            model=module,
            model_parameters=groups,
            optimizer=own_optimizer(config, module, groups, context.args, names),
            lr_scheduler=None if "scheduler" in config else schedule(context.args, context.max_steps),
            mpu=grid,
            config=config,
            dist_init_required=False,
        )
    give_timeout(open_groups() - groups_before)
    reduce_fp32_gradients(engine.optimizer)
    find_matrices(engine, context.groups)
    correct_clipping(engine, context.groups, skip_nonfinite=acts)
    reduce_in_place(engine.optimizer)
    if acts:
        check_every_gradient(engine.optimizer)
    torch.manual_seed(context.args.seed + context.groups.coordinate.dp_rank + 1000 * context.groups.coordinate.stage)
    if context.resolved.zero_stage == 3 and traits.draws:
        copy_hooked_inputs(module)
    compression = None
    if isinstance(module, LayerSequence):
        announce_layers(module.calls)
    else:
        compression = _change_steps(engine, context)
        guarded.release = partial(forget_outputs, engine)
    kind = PipelineStages if context.is_pipeline else WholeModel
    built = kind(engine, context.groups, guarded, context.device, context.dtype, context.args.seed, keys)
    built.compression = compression
    UnusedParameters(engine)
    return built


def _change_steps(engine: PipelineEngine, context: EngineContext) -> CompressedReduction | None:
    """Have a pipeline's engine sum partial gradients, average gradients and follow a schedule as the run asks; return
    what averages, if DeepSpeed does not."""
    resolved, parameters = context.resolved, list(engine.module.parameters())
    compression = compress_gradients(engine, context.groups, resolved.gradient_bits, context.device)
    if context.groups.dp_group is None:
        keep_own_gradients(engine)
    put_off_sums(parameters)
    if context.device.type != "cpu":  # there the cores that sum are those that compute: a step took 1.04 times as long
        overlap_sums(engine.module)
    sum_tied_gradients(engine, partial(sum_once, parameters))
    give_every_gradient(engine)
    follow_schedule(engine, resolved.schedule, resolved.parts)
    announce_instructions(engine, beat)
    return compression


def _build_module(
    context: EngineContext,
    layers: Sequence[Layer],
    boundaries: Sequence[int],
    loss: GuardedLoss,
    keys: DrawKeys | None,
    example: Value | None,
) -> tuple[nn.Module, PipelineParallelGrid | None]:
    """Build this rank's layers; and the grid of ranks, by which DeepSpeed finds the groups of what is no pipeline."""
    interval, seed, layout = context.resolved.activation_checkpoint_interval, context.args.seed, context.groups.layout
    if context.is_pipeline:
        staged = StagedModule(
            layers,
            layout=layout,
            boundaries=boundaries,
            parts=context.resolved.parts,
            loss_fn=loss,
            checkpoint_interval=interval,
            seed=seed,
            keys=keys,
        )
        return staged, None
    grid = PipelineParallelGrid(topology=deepspeed_topology(layout), process_group=dist.group.WORLD)
    whole = LayerSequence(layers, checkpoint_interval=interval, seed=seed, keys=keys)
    if context.resolved.zero_stage == 3 and example is not None:
        mark_leaves(whole, leaves_of_sequence(whole, whole.calls, example))
    return whole, grid


def _compile(module: nn.Module, context: EngineContext) -> None:
    """Have the decoder layers of this rank compiled, where the config asks for it."""
    backend = context.resolved.compile_backend
    if backend is None:
        return
    layers: Sequence[object] = module.calls if isinstance(module, LayerSequence) else []
    if isinstance(module, StagedModule):
        layers = [call for _, call in module.indexed_layers()]
    compile_modules(
        (part for layer in layers if isinstance(layer, ModelLayer) for part in layer.compiled_parts()), backend
    )


def draw_keys(context: EngineContext) -> DrawKeys:
    """Return the keys of the micro-batches that this rank trains on."""
    groups = context.groups
    return DrawKeys(
        seed=context.args.seed,
        micro_batch=context.resolved.micro_batch,
        data_rank=groups.coordinate.dp_rank,
        data_size=groups.layout.dp_size,
        tensor=TensorParallel.of(groups.tp_group),
        device=context.device,
    )


def _nothing_shared_out(config: JsonObject) -> JsonObject:
    """Return the config without what takes activations for equal on tensor-parallel ranks; UserError where it is asked
    for."""
    if config.get("activation_checkpointing", {}).get("partition_activations", False):
        raise UserError(
            "activation_checkpointing.partition_activations: this model's layers pass on tensors that differ between "
            "tensor-parallel ranks: remove it"
        )
    whole = {"pipe_partitioned": False, "grad_partitioned": False}
    return {**config, "pipeline": {**config.get("pipeline", {}), **whole}}


def _configure_checkpointing(context: EngineContext) -> None:
    """Hand the section `activation_checkpointing` to DeepSpeed; only tensor-parallel ranks can share activations."""
    section = context.resolved.config.get("activation_checkpointing", {})
    groups = context.groups
    partitioned = section.get("partition_activations", False) and groups.tp_group is not None
    checkpointing.configure(
        MpuAdapter(groups.coordinate.tp_rank, groups.layout.tp_size, groups.tp_group),
        partition_activations=partitioned,
        contiguous_checkpointing=section.get("contiguous_memory_optimization", False) and partitioned,
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=section.get("cpu_checkpointing", False) and context.device.type != "cpu",
        synchronize=section.get("synchronize_checkpoint_boundary", False),
        profile=section.get("profile", False),
    )


def mark_leaves(module: nn.Module, names: Iterable[str]) -> None:
    """Have ZeRO-3 see the named modules as one each, with all that they call."""
    for name in names:
        set_z3_leaf_module(module.get_submodule(name), True)


def deepspeed_config(context: EngineContext) -> JsonObject:
    """Return the resolved config as DeepSpeed gets it."""
    config = without_idle(Secrets(frozenset()).without(context.resolved.config))  # DeepSpeed prints its config
    if not config.get("steps_per_print"):  # the harness has its own metrics; the timers are printed with DeepSpeed's
        config["steps_per_print"] = context.args.logging_steps if config.get("wall_clock_breakdown") else 2**31
    if context.device.type == "cpu" and context.resolved.zero_stage == 3:
        # a CPU's memory is not left in pieces: gradients are reduced where they lie
        config["zero_optimization"] = {**config["zero_optimization"], "contiguous_gradients": False}
    config["zero_allow_untested_optimizer"] = True
    # an optimizer on the CPU that is torch's must not be refused; DeepSpeed's own would have to be compiled first
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    optimizer = config.get("optimizer", {})
    if optimizer.get("type", "").lower() == "muon":  # the harness brings its own
        config["zero_force_ds_cpu_optimizer"] = False
    if context.device.type == "cpu" and optimizer.get("type", "").lower() in ("adam", "adamw"):
        params = {"torch_adam": True, **optimizer.get("params", {})}
        config["optimizer"] = {**optimizer, "params": params}
    for section in MONITORS.values():  # the harness writes to them
        config.pop(section, None)
    if file := config.get("flops_profiler", {}).get("output_file"):
        file = within(context.args.output_dir, file, "flops_profiler.output_file")
        config["flops_profiler"] = {**config["flops_profiler"], "output_file": file}
    return config
