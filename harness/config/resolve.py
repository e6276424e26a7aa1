"""Turns a config with "auto" in it, and the arguments of a run, into the config that DeepSpeed gets.

Pure: no process, no model, no file. HuggingFace's meaning of "auto" holds where it has one (transformers'
HfTrainerDeepSpeedConfig), with the data-parallel size in the place of the world size. Whatever cannot run is
collected and raised as one ConfigError, before anything is built.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.batch import complete
from harness.config.diagnostic import Diagnostic, Severity
from harness.config.document import Document
from harness.config.errors import ConfigError
from harness.config.values import AUTO, AutoValues, Filled, Resolved, lookup, put, whole
from harness.config.wording import counted

PARTITIONS = ("balanced", "measured", "uniform", "parameters")
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
MICRO_BATCHES_A_STAGE = 4  # keeps the bubble under 1/5; GPipe, arXiv 1811.06965, section 2.3


@dataclass
class _Run:
    """A resolution under way: the config that is being filled, what was filled, what was found."""

    config: dict[str, Any]
    values: AutoValues
    document: Document | None
    filled: list[Filled] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)

    def get(self, pointer: str) -> Any:
        return lookup(self.config, pointer)

    def number(self, pointer: str) -> int | None:
        """The whole number at a pointer; None if it is absent or "auto"; anything else is a problem."""
        value = self.get(pointer)
        if value is None or value == AUTO:
            return None
        number = whole(value)
        if number is None:
            self.refuse("DS201", pointer, f"{name_of(pointer)} is {value!r}, not a whole number", "write a number")
        return number

    def fill(self, pointer: str, value: Any, source: str) -> None:
        put(self.config, pointer, value)
        self.filled.append(Filled(pointer=pointer, value=value, source=source))

    def refuse(self, code: str, pointer: str, message: str, hint: str) -> None:
        line, column = self.document.locate(pointer) if self.document else (1, 1)
        self.problems.append(
            Diagnostic(
                code=code,
                severity=Severity.ERROR,
                message=message,
                hint=hint,
                pointer=pointer,
                file=self.document.path if self.document else "",
                line=line,
                column=column,
            )
        )


def name_of(pointer: str) -> str:
    """`zero_optimization.stage` for `/zero_optimization/stage`: how a user writes it."""
    return pointer.strip("/").replace("/", ".")


def resolve(config: Mapping[str, Any] | Document, values: AutoValues) -> Resolved:
    """Fills in every "auto", derives the layout; raises one ConfigError with everything that cannot run."""
    document = config if isinstance(config, Document) else None
    data = config.data if isinstance(config, Document) else config
    run = _Run(copy.deepcopy(dict(data)), values, document)
    pipeline, tensor, data_parallel = _layout(run)
    expert = _experts(run, tensor)
    _batch(run, pipeline, data_parallel)
    precision = _precision(run)
    _fill_from_arguments(run)
    _fill_from_model(run)
    interval = run.number("/pipeline/activation_checkpoint_interval") or 0
    partition = _partition(run)
    stage = _zero_stage(run, pipeline)
    _fill_the_rest(run, "", run.config)
    if run.problems:
        raise ConfigError(run.problems)
    for section in ("tensor_parallel", "expert_parallel"):
        run.config.pop(section, None)  # the harness cuts the layers itself; DeepSpeed would do it again
    run.config.pop("$schema", None)
    return Resolved(
        config=run.config,
        filled=tuple(run.filled),
        pipeline=pipeline,
        tensor=tensor,
        data=data_parallel,
        expert=expert,
        micro_batch=run.config["train_micro_batch_size_per_gpu"],
        accumulation=run.config["gradient_accumulation_steps"],
        train_batch=run.config["train_batch_size"],
        zero_stage=stage,
        precision=precision,
        partition=partition,
        activation_checkpoint_interval=interval,
    )


def _layout(run: _Run) -> tuple[int, int, int]:
    """Pipeline, tensor and data-parallel size."""
    values = run.values
    pipeline = values.pipeline_parallel_size or run.number("/pipeline/stages") or 1
    tensor = values.tensor_parallel_size or run.number("/tensor_parallel/autotp_size") or 1
    if pipeline < 1 or tensor < 1:
        sizes = f"{counted(pipeline, 'stage')} x {counted(tensor, 'tensor-parallel rank')}"
        run.refuse("DS311", "", f"a layout of {sizes}", "use sizes from 1")
        return 1, 1, max(1, values.world_size)
    if values.world_size % (pipeline * tensor):
        cuts = f"{counted(pipeline, 'pipeline stage')} x {counted(tensor, 'tensor-parallel rank')}"
        message = f"{counted(values.world_size, 'rank')} cannot be divided into {cuts}"
        pointer = "/pipeline/stages" if pipeline > 1 else "/tensor_parallel/autotp_size"
        run.refuse("DS311", pointer, message, f"start a multiple of {pipeline * tensor} ranks, or change the layout")
    if pipeline > 1 or isinstance(run.get("/pipeline"), dict):
        if run.get("/pipeline/stages") not in (None, pipeline):
            source = "--pipeline_parallel_size" if values.pipeline_parallel_size else "default"
            run.fill("/pipeline/stages", pipeline, source)
        put(run.config, "/pipeline/stages", pipeline)
        if run.get("/pipeline/use_reentrant") is None:
            # reentrant checkpointing has no gradient where a layer's input is integer ids
            run.fill("/pipeline/use_reentrant", False, "harness")
    return pipeline, tensor, max(1, values.world_size // (pipeline * tensor))


def _experts(run: _Run, tensor: int) -> int:
    """The ranks over which whole experts are spread: those of a tensor-parallel group, or 1."""
    asked = run.number("/expert_parallel/autoep_size") if run.get("/expert_parallel/enabled") is True else None
    size = run.values.expert_parallel_size or asked or 1
    if size not in (1, tensor):
        run.refuse(
            "DS314",
            "/expert_parallel/autoep_size",
            f"experts over {size} ranks, and tensor parallelism over {tensor}",
            f"set tensor_parallel.autotp_size to {size} too: its ranks share out the experts",
        )
    return size


_BATCH = {
    "/train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "/gradient_accumulation_steps": "gradient_accumulation_steps",
}


def _batch(run: _Run, pipeline: int, data_parallel: int) -> None:
    """Writes all three batch sizes."""
    values = run.values
    train = run.number("/train_batch_size")
    sizes = {pointer: run.number(pointer) for pointer in _BATCH}
    sources: dict[str, str] = {}
    for pointer, name in _BATCH.items():
        argument = getattr(values, name)
        if name in values.given:
            _must_agree(run, pointer, name, sizes[pointer], argument)
            sizes[pointer], sources[pointer] = argument, f"--{name}"
    micro_at, accumulation_at = _BATCH
    if train is None and sizes[micro_at] is None:
        sizes[micro_at] = values.per_device_train_batch_size
        sources[micro_at] = values.source("per_device_train_batch_size")
    if sizes[accumulation_at] is None and (train is None or sizes[micro_at] is None):
        chosen = _accumulation(run, pipeline, train // data_parallel if train else None)
        sizes[accumulation_at], sources[accumulation_at] = chosen
    batch = complete(train, sizes[micro_at], sizes[accumulation_at], data_parallel)
    if batch is None or not batch.fits(data_parallel):
        run.refuse("DS302", "/train_batch_size", _misfit(run, train, sizes, data_parallel), "give two of the three")
        return
    for pointer, size in {micro_at: batch.micro, accumulation_at: batch.accumulation}.items():
        if run.get(pointer) != size:
            run.fill(pointer, size, sources.get(pointer, "train_batch_size"))
    if run.get("/train_batch_size") != batch.train:
        run.fill("/train_batch_size", batch.train, "micro-batch x accumulation x data parallel")


def _accumulation(run: _Run, pipeline: int, samples: int | None) -> tuple[int, str]:
    """Accumulation steps where nobody says a number; `samples` of a data-parallel rank are divided by it."""
    values = run.values
    if pipeline == 1 or run.get("/gradient_accumulation_steps") != AUTO:
        return (
            (1, "default")
            if samples
            else (
                values.gradient_accumulation_steps,
                values.source("gradient_accumulation_steps"),
            )
        )
    wanted = MICRO_BATCHES_A_STAGE * pipeline
    if samples:
        wanted = next((count for count in range(wanted, 0, -1) if samples % count == 0), 1)
    return wanted, f"up to {MICRO_BATCHES_A_STAGE} micro-batches a pipeline stage"


def _misfit(run: _Run, train: int | None, sizes: Mapping[str, int | None], data_parallel: int) -> str:
    micro, accumulation = (("not given" if size is None else size) for size in sizes.values())
    return (
        f"train_batch_size {'not given' if train is None else train} is not micro-batch {micro}"
        f" x accumulation {accumulation} x data parallel {data_parallel}"
    )


def _must_agree(run: _Run, pointer: str, name: str, in_file: Any, argument: Any) -> None:
    """A value that stands in the file and was given as an argument must be the same."""
    if in_file is None or in_file in (AUTO, argument):
        return
    message = f"--{name} is {argument} and {name_of(pointer)} is {in_file}"
    run.refuse("DS951", pointer, message, 'give one of them, or write "auto" in the file')


def _precision(run: _Run) -> str:
    """Fills bf16 and fp16; the name of the precision."""
    enabled = {}
    for name in ("bf16", "fp16"):
        pointer, wanted = f"/{name}/enabled", getattr(run.values, name)
        section = "bfloat16" if name == "bf16" and "bf16" not in run.config else name
        pointer = f"/{section}/enabled" if section in run.config else pointer
        stated = run.get(pointer)
        if name in run.values.given:
            _must_agree(run, pointer, name, stated, wanted)
        if stated == AUTO or (stated is None and wanted and name in run.values.given):
            run.fill(pointer, wanted, run.values.source(name))
        enabled[name] = run.get(pointer) is True
    if all(enabled.values()):
        run.refuse("DS401", "/fp16/enabled", "bf16 and fp16 are both enabled", "enable one of them")
    return next((name for name, on in enabled.items() if on), "fp32")


def _fill_from_arguments(run: _Run) -> None:
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
            _must_agree(run, pointer, name, stated, value)
    if run.get("/scheduler/params/warmup_num_steps") == 0:
        run.fill("/scheduler/params/warmup_num_steps", 1, "DeepSpeed refuses 0; 1 is as good as none")
    if run.get("/scheduler/params/warmup_min_lr") == AUTO:
        run.fill("/scheduler/params/warmup_min_lr", 0, "default, as in HF")
    kind = SCHEDULERS.get(str(run.get("/scheduler/type")))
    if kind and "lr_scheduler_type" in values.given and values.lr_scheduler_type != kind:
        _must_agree(run, "/scheduler/type", "lr_scheduler_type", run.get("/scheduler/type"), values.lr_scheduler_type)


def _fill_from_model(run: _Run) -> None:
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


def _partition(run: _Run) -> str:
    """How stage boundaries are chosen."""
    method = run.get("/pipeline/partition")
    if method in (None, AUTO):
        return PARTITIONS[0]
    if isinstance(method, str) and (method in PARTITIONS or (method.startswith("type:") and len(method) > 5)):
        return method
    known = ", ".join((*PARTITIONS, "type:REGEX"))
    run.refuse("DS604", "/pipeline/partition", f"unknown partition {method!r}", f"use one of {known}")
    return PARTITIONS[0]


def _zero_stage(run: _Run, pipeline: int) -> int:
    """The ZeRO stage, and what cannot run with it."""
    stage = run.number("/zero_optimization/stage") or 0
    if pipeline > 1 and stage > 1:
        message = f"ZeRO-{stage} with {pipeline} pipeline stages: a stage keeps its gradients between micro-batches"
        hint = "use ZeRO-1 with the pipeline, or ZeRO without pipeline stages"
        run.refuse("DS601", "/zero_optimization/stage", message, hint)
    device = run.get("/zero_optimization/offload_param/device")
    if device not in (None, "none", AUTO) and stage < 3:
        message = f"offload_param works at ZeRO-3 only, and the stage is {stage}"
        run.refuse("DS501", "/zero_optimization/offload_param", message, "set stage to 3, or remove offload_param")
    return stage


_MEANINGFUL_AUTO = {"/data_types/keep_in_fp32_modules", "/tensor_parallel/autotp_size"}


def _fill_the_rest(run: _Run, pointer: str, section: dict[str, Any]) -> None:
    """Removes every "auto" that is left: what DeepSpeed does with an absent key is its default."""
    for key, value in list(section.items()):
        here = f"{pointer}/{key}"
        if isinstance(value, dict):
            _fill_the_rest(run, here, value)
        elif value == AUTO and here not in _MEANINGFUL_AUTO:
            del section[key]
            run.filled.append(Filled(pointer=here, value=None, source="left out: DeepSpeed's default"))
