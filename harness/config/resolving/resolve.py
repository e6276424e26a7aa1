"""Turns a config with "auto" in it, and the arguments of a run, into the config that DeepSpeed gets.

Pure: no process, no model, no file. HuggingFace's meaning of "auto" holds where it has one (transformers'
HfTrainerDeepSpeedConfig), with the data-parallel size in the place of the world size. Whatever cannot run is
collected and raised as one ConfigError, before anything is built.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from harness.config.diagnostic import ConfigError
from harness.config.resolving import sizes
from harness.config.resolving.resolution import Resolution
from harness.config.resolving.resolved import Filled, Resolved
from harness.config.schema.normalize import as_read
from harness.config.text.document import Document
from harness.config.values.arguments import AutoValues
from harness.config.values.layout_keys import PARTITION_FORMS, PARTITIONS, partition_method
from harness.config.values.pointers import AUTO, put

SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def resolve(config: Mapping[str, Any] | Document, values: AutoValues) -> Resolved:
    """Fills in every "auto", derives the layout; raises one ConfigError with everything that cannot run."""
    document = config if isinstance(config, Document) else None
    data = config.data if isinstance(config, Document) else config
    run = Resolution(as_read(data), values, document)
    pipeline, tensor, data_parallel = sizes.layout(run)
    expert = sizes.experts(run, tensor)
    sizes.batch(run, data_parallel)
    precision = _precision(run)
    _fill_from_arguments(run)
    _fill_from_model(run)
    interval = run.number("/pipeline/activation_checkpoint_interval") or 0
    partition = _partition(run, pipeline)
    stage = _accumulate_in_fp32(run, precision, _zero_stage(run, pipeline))
    _fill_the_rest(run, "", run.config)
    if run.problems:
        raise ConfigError(run.problems)
    run.config.pop("$schema", None)
    alone = _for_deepspeed_alone(run, pipeline, tensor)
    for section in ("tensor_parallel", "expert_parallel"):
        run.config.pop(section, None)  # the harness cuts the layers itself; DeepSpeed would do it again
    return Resolved(
        config=run.config,
        alone=alone,
        filled=tuple(run.filled),
        pp_size=pipeline,
        tp_size=tensor,
        dp_size=data_parallel,
        ep_size=expert,
        micro_batch=run.config["train_micro_batch_size_per_gpu"],
        accumulation=run.config["gradient_accumulation_steps"],
        train_batch=run.config["train_batch_size"],
        zero_stage=stage,
        precision=precision,
        partition=partition,
        activation_checkpoint_interval=interval,
    )


def _for_deepspeed_alone(run: Resolution, pipeline: int, tensor: int) -> dict[str, Any]:
    """The config for a program without the harness, on the same ranks.

    DeepSpeed cuts the layers itself then, by AutoTP, and counts ranks as data-parallel that share a copy of the
    model: the global batch is left for it to multiply.
    """
    alone = copy.deepcopy(run.config)
    if tensor > 1:
        put(alone, "/tensor_parallel/autotp_size", tensor)
    elif run.get("/tensor_parallel/autotp_size") is not None:
        put(alone, "/tensor_parallel/autotp_size", 0)
    if pipeline * tensor > 1:
        del alone["train_batch_size"]
    return alone


def _precision(run: Resolution) -> str:
    """Fills bf16 and fp16; the name of the precision."""
    enabled = {}
    for name in ("bf16", "fp16"):
        pointer, wanted = f"/{name}/enabled", getattr(run.values, name)
        section = "bfloat16" if name == "bf16" and "bf16" not in run.config else name
        pointer = f"/{section}/enabled" if section in run.config else pointer
        stated = run.get(pointer)
        if name in run.values.given:
            run.must_agree(pointer, name, stated, wanted)
        if stated == AUTO or (stated is None and wanted and name in run.values.given):
            run.fill(pointer, wanted, run.values.source(name))
        enabled[name] = run.get(pointer) is True
    if all(enabled.values()):
        run.refuse("DS401", "/fp16/enabled", "bf16 and fp16 are both enabled", "enable one of them")
    return next((name for name, on in enabled.items() if on), "fp32")


def _fill_from_arguments(run: Resolution) -> None:
    """Clipping, optimizer and scheduler: the argument where the file says "auto", and the two must agree."""
    values = run.values
    if run.get("/gradient_clipping") is None:  # absent, DeepSpeed would clip at 1.0 whatever the argument says
        run.fill("/gradient_clipping", values.max_grad_norm, values.source("max_grad_norm"))
    betas = [values.adam_beta1, values.adam_beta2]
    betas_name = next((n for n in ("adam_beta1", "adam_beta2") if n in values.given), "adam_beta1")
    warmup = max(1, values.warmup_steps)  # DeepSpeed's schedules want at least 1
    for pointer, name, value in (
        ("/gradient_clipping", "max_grad_norm", values.max_grad_norm),
        ("/optimizer/params/lr", "learning_rate", values.learning_rate),
        ("/optimizer/params/betas", betas_name, betas),
        ("/optimizer/params/eps", "adam_epsilon", values.adam_epsilon),
        ("/optimizer/params/weight_decay", "weight_decay", values.weight_decay),
        ("/scheduler/params/warmup_max_lr", "learning_rate", values.learning_rate),
        ("/scheduler/params/warmup_num_steps", "warmup_steps", warmup),
        ("/scheduler/params/total_num_steps", "max_steps", values.max_steps),
    ):
        stated = run.get(pointer)
        if stated == AUTO:
            run.fill(pointer, value, values.source(name))
        elif name in values.given:
            run.must_agree(pointer, name, stated, value)
    if run.get("/scheduler/params/warmup_num_steps") == 0:
        run.fill("/scheduler/params/warmup_num_steps", 1, "DeepSpeed refuses 0; 1 step has the same effect")
    if run.get("/scheduler/params/warmup_min_lr") == AUTO:
        run.fill("/scheduler/params/warmup_min_lr", 0, "default, as in HF")
    kind = SCHEDULERS.get(str(run.get("/scheduler/type")))
    if kind and "lr_scheduler_type" in values.given and values.lr_scheduler_type != kind:
        run.must_agree("/scheduler/type", "lr_scheduler_type", run.get("/scheduler/type"), values.lr_scheduler_type)


def _fill_from_model(run: Resolution) -> None:
    """ZeRO's bucket sizes from the hidden size, as HF and Accelerate do."""
    hidden = run.values.hidden_size
    if not hidden:
        return
    for key, value, source in (
        ("reduce_bucket_size", hidden * hidden, "hidden_size squared"),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden), "0.9 x hidden_size squared"),
        ("stage3_param_persistence_threshold", 10 * hidden, "10 x hidden_size"),
    ):
        if run.get(f"/zero_optimization/{key}") == AUTO:
            run.fill(f"/zero_optimization/{key}", value, source)


def _partition(run: Resolution, pipeline: int) -> str:
    """How stage boundaries are chosen."""
    stated = run.get("/pipeline/partition")
    method = partition_method(stated)
    if method is None and pipeline > 1:
        known = ", ".join(PARTITION_FORMS)
        run.refuse("DS604", "/pipeline/partition", f"unknown partition {stated!r}", f"use one of {known}")
    return method or PARTITIONS[0]


def _zero_stage(run: Resolution, pipeline: int) -> int:
    """The ZeRO stage, and what cannot run with it."""
    stage = run.number("/zero_optimization/stage") or 0
    if pipeline > 1 and stage > 1:
        message = f"ZeRO-{stage} with {pipeline} pipeline stages: a stage keeps its gradients between micro-batches"
        hint = "use ZeRO-1 with the pipeline, or ZeRO without pipeline stages"
        run.refuse("DS601", "/zero_optimization/stage", message, hint)
    device = run.get("/zero_optimization/offload_param/device")
    if device not in (None, "none", AUTO) and stage < 3:
        message = f"offload_param works at ZeRO-3 only, but the stage is {stage}"
        run.refuse("DS501", "/zero_optimization/offload_param", message, "set stage to 3, or remove offload_param")
    return stage


def _accumulate_in_fp32(run: Resolution, precision: str, stage: int) -> int:
    """Has bf16 gradients accumulated in float32 unless the file says otherwise; the ZeRO stage that this takes."""
    pointer = "/data_types/grad_accum_dtype"
    masters = run.get("/bf16/bf16_master_weights_and_grads") or run.get("/bfloat16/bf16_master_weights_and_grads")
    if precision != "bf16" or masters or run.get(pointer) not in (None, AUTO):
        return stage
    run.fill(pointer, "fp32", "harness: a sum in bf16 loses small gradients")
    if stage == 0:
        run.fill("/zero_optimization/stage", 1, "for bf16 DeepSpeed uses the same optimizer at stages 0 and 1")
    return max(stage, 1)


_MEANINGFUL_AUTO = {"/data_types/keep_in_fp32_modules", "/tensor_parallel/autotp_size"}


def _fill_the_rest(run: Resolution, pointer: str, section: dict[str, Any]) -> None:
    """Removes every "auto" that is left: what DeepSpeed does with an absent key is its default."""
    for key, value in list(section.items()):
        here = f"{pointer}/{key}"
        if isinstance(value, dict):
            _fill_the_rest(run, here, value)
        elif value == AUTO and here not in _MEANINGFUL_AUTO:
            del section[key]
            run.filled.append(Filled(pointer=here, value=None, source="left out: DeepSpeed's default"))
