"""Resolve a config with "auto" and the arguments of a run to the config passed to DeepSpeed.

Starts no process, and reads at most the model's config.json. "auto" has HuggingFace's meaning (transformers'
HfTrainerDeepSpeedConfig), but with the data-parallel size in place of the world size. Only the config check refuses
anything here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from harness.config.resolving import filling
from harness.config.resolving.config_check import ConfigCheck
from harness.config.resolving.filling import Resolution
from harness.config.resolving.resolved import Resolved
from harness.config.values.arguments import AutoValues
from harness.config.values.config_file import FROM_PROGRAM, ConfigFile, read_plain
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import (
    ATTENTION_TILE,
    FEED_FORWARD_TILE,
    LOSS_TILE,
    PARTITIONS,
    TENSOR,
    partition_method,
    schedule_name,
)
from harness.config.values.pointers import put
from harness.config.values.view import ConfigView
from harness.schedules import DEFAULT


def resolve_before_data(
    config: Mapping[str, object] | ConfigFile,
    values: AutoValues,
    *,
    check: ConfigCheck | None,
    model: str | None = None,
    allow_ignored_keys: bool = False,
) -> Resolved:
    """Check a config together with the run's arguments, and replace every "auto" that needs no data and no model.

    `complete` replaces the rest (`OF_DATA_AND_MODEL`) once they are known.

    Args:
        config: a config as read, or values from a program.
        values: the run's arguments.
        check: refuses a wrong config; None to check nothing.
        model, allow_ignored_keys: as for `ConfigCheck.require_valid`.

    Raises:
        ConfigError: the check refuses the config.
    """
    document = read(config, check) if isinstance(config, Mapping) else config
    run = Resolution(copy.deepcopy(document.data) if check is None else check.as_read(document.data), values)
    # The config may still be wrong: a value that cannot be derived is omitted here, and the check refuses the config.
    filling.fill_batch(run, ConfigView(data=run.config, **values.layout).batch_ranks or 1)
    filling.fill_precision(run)
    # Before the arguments, as it writes "auto" for those that its optimizer takes.
    filling.fill_optimizer(run)
    filling.fill_checkpointing(run)
    filling.fill_from_arguments(run)
    if check is not None:
        check.require_valid(document, run.filled, values, model=model, allow_ignored_keys=allow_ignored_keys)
    # The view gets a copy, as sections that the harness alone reads are removed from the config.
    return _resolved(run, ConfigView(data=copy.deepcopy(run.config), **values.layout))


def read(config: str | Mapping[str, object], check: ConfigCheck | None, path: str = FROM_PROGRAM) -> ConfigFile:
    """Read a config with the check's reader, if there is a check; see `ConfigCheck.read`."""
    return read_plain(config, path) if check is None else check.read(config, path)


def complete(resolved: Resolved, values: AutoValues) -> Resolved:
    """Complete the result of `resolve_before_data`: the scheduler's steps and ZeRO's bucket sizes."""
    # Copies: the caller keeps `resolved`, and may complete it again for other data.
    config = Resolution(copy.deepcopy(resolved.config), values)
    alone = Resolution(copy.deepcopy(resolved.alone), values)
    for run in (config, alone):
        filling.fill_steps(run)
        filling.fill_from_model(run)
        filling.fill_bucket(run, resolved.zero_stage)
        filling.remove_autos(run, "", run.config)
    filled = (*resolved.filled, *config.filled)
    return replace(resolved, config=config.config, alone=alone.config, filled=filled)


def _resolved(run: Resolution, view: ConfigView) -> Resolved:
    """Return the config for DeepSpeed, and the settings that the harness reads from it."""
    filling.fill_pipeline(run, view.pp_size)
    stage = filling.fill_zero_stage(run, view.precision, view.zero_stage or 0)
    filling.remove_autos(run, "", run.config, keep=filling.OF_DATA_AND_MODEL)
    run.config.pop("$schema", None)
    alone = _for_deepspeed_alone(run, view)
    # The harness shards the layers itself: with these sections DeepSpeed would shard them again.
    for section in ("tensor_parallel", "expert_parallel", "context_parallel", "sequence_parallel_size", "tiling"):
        run.config.pop(section, None)
    return Resolved(
        config=run.config,
        alone=alone,
        filled=tuple(run.filled),
        pp_size=view.pp_size,
        tp_size=view.tp_size,
        dp_size=view.dp_size or 1,
        ep_size=view.ep_size,
        token_pieces=view.token_pieces,
        cp_size=view.cp_size,
        sequence_parallel=view.sequence_parallel,
        compile_backend=view.compile_backend,
        compile_options=view.compile_options,
        micro_batch=run.config["train_micro_batch_size_per_gpu"],
        accumulation=run.config["gradient_accumulation_steps"],
        train_batch=run.config["train_batch_size"],
        zero_stage=stage,
        precision=view.precision,
        partition=partition_method(view.get("/pipeline/partition")) or PARTITIONS[0],
        schedule=schedule_name(view.get("/pipeline/schedule")) or DEFAULT,
        chunks=view.chunks,
        gradient_bits=view.gradient_bits,
        reduces_once=view.reduces_once,
        activation_checkpoint_interval=view.size("/pipeline/activation_checkpoint_interval") or 0,
        loss_tile=view.size(LOSS_TILE) or 0,
        attention_tile=view.size(ATTENTION_TILE) or 0,
        feed_forward_tile=view.size(FEED_FORWARD_TILE) or 0,
    )


def _for_deepspeed_alone(run: Resolution, view: ConfigView) -> JsonObject:
    """Return the config for a program without the harness, on the same ranks: DeepSpeed shards the layers by AutoTP."""
    alone = copy.deepcopy(run.config)
    for section in ("context_parallel", "tiling"):
        alone.pop(section, None)
    if view.cp_size > 1:
        alone["sequence_parallel_size"] = view.cp_size
    for section, names in {
        "tensor_parallel": ("sequence_parallel",),
        "compile": ("enabled", "backend", "mode", "dynamic", "fullgraph", "kwargs"),
    }.items():
        for name in names:
            alone.get(section, {}).pop(name, None)
    if view.tp_size > 1:
        put(alone, TENSOR, view.tp_size)
    elif run.get(TENSOR) is not None:
        put(alone, TENSOR, 0)
    # DeepSpeed counts all ranks of one copy of the model as data-parallel, so it must compute the global batch.
    if view.pp_size * view.tp_size > 1:
        del alone["train_batch_size"]
    return alone
