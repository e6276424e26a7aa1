"""Rules about the pipeline: settings that exclude it, its idle time, and settings with which it cannot train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.batch import bubble, idle, micro_batches_wanted
from harness.config.values.layout_keys import PARTITION_FORMS, partition_method, schedule_name
from harness.config.values.pointers import AUTO
from harness.schedules import DEFAULT, SCHEDULES
from harness.wording import counted


@rule("DS601", "zero-2-with-pipeline", Severity.WARNING, claim="elsewhere")
def zero_2_with_pipeline(view: RunView) -> Iterator[Finding]:
    """Pipeline stages together with ZeRO-2 or ZeRO-3.

    A stage needs its gradients until all micro-batches have passed, and its parameters for each of
    them, so partitioning them would save nothing. DeepSpeed's PipelineEngine refuses it, but only
    after every rank has built its model; the harness refuses it at once. ZeRO-1 works with a pipeline.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}
    """
    if view.pp_size > 1 and view.zero_stage in (2, 3):
        yield Finding(
            pointer="/zero_optimization/stage",
            message=f"ZeRO-{view.zero_stage} cannot run with {view.pp_size} pipeline stages",
            hint="use ZeRO-1 with the pipeline, or set pipeline.stages to 1",
            severity=Severity.ERROR if view.target == "harness" else None,
            deepspeed="raises AssertionError in PipelineEngine, after the model has been built",
            on_value=True,
        )


@rule("DS602", "reentrant-checkpointing", Severity.WARNING, claim="elsewhere")
def reentrant_checkpointing(view: RunView) -> Iterator[Finding]:
    """A pipeline uses reentrant activation checkpointing.

    Reentrant checkpointing needs an input that requires a gradient. The first layer's input is integer ids, so backward
    ends with "element 0 of tensors does not require grad" on the first stage, and the others report a lost connection.
    Reentrant is DeepSpeed's default; the harness sets `use_reentrant` to false unless the file says otherwise.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2,
           "activation_checkpoint_interval": 1, "use_reentrant": true}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2,
           "activation_checkpoint_interval": 1, "use_reentrant": false}}
    """
    interval = view.size("/pipeline/activation_checkpoint_interval")
    value = view.get("/pipeline/use_reentrant")
    by_default = value is None and view.target != "harness" and view.pp_size > 1
    if interval and (value is True or by_default):
        yield Finding(
            pointer="/pipeline/use_reentrant" if value else "/pipeline/activation_checkpoint_interval",
            message="reentrant checkpointing computes no gradient for a stage whose input is integer ids",
            hint="set pipeline.use_reentrant to false",
            deepspeed="fails in the first backward pass of a stage that starts with an embedding",
        )


@rule("DS603", "pipeline-bubble", Severity.INFO, claim="elsewhere")
def pipeline_bubble(view: RunView) -> Iterator[Finding]:
    """Too few micro-batches to keep the stages busy.

    With p stages and m micro-batches (gradient_accumulation_steps) every stage idles for (p - 1) / (m + p -
    1) of a step. With 4 (p - 1) micro-batches or more that is at most a fifth. `"schedule": "zero-bubble"` leaves a
    third of the idle time, (p - 1) / (3 m + p - 1) of a step; schedules with several model chunks per stage leave less
    (docs/layouts.md).

    The harness never changes the number of micro-batches. A run that idles for more than a fifth of a step says so when
    it starts. Sources: GPipe, arXiv 1811.06965, section 2.3; Zero Bubble Pipeline Parallelism, arXiv 2401.10241,
    section 3.1.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "pipeline": {"stages": 4}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16, "pipeline": {"stages": 4}}
    """
    steps = view.size("/gradient_accumulation_steps")
    if (
        steps is None
        and view.get("/gradient_accumulation_steps") is None
        and view.has("/train_micro_batch_size_per_gpu")
    ):
        steps = 1 if view.get("/train_batch_size") is None else None
    schedule = schedule_name(view.get("/pipeline/schedule")) if view.target == "harness" else None
    order = schedule or DEFAULT, view.chunks.per_stage
    wanted = micro_batches_wanted(view.pp_size, *order)
    if view.pp_size == 1 or steps is None or steps >= wanted:
        return
    less = bubble(view.pp_size, wanted, *order)
    yield Finding(
        pointer="/gradient_accumulation_steps" if view.has("/gradient_accumulation_steps") else "/pipeline/stages",
        message=idle(view.pp_size, steps, *order),
        hint=f"{counted(wanted, 'micro-batch', 'micro-batches')} reduce that to {less:.0%}",
        deepspeed="runs; the stages wait for each other",
        on_value=True,
    )


@rule("DS604", "unknown-partition", Severity.WARNING, claim="runs")
def unknown_partition(view: RunView) -> Iterator[Finding]:
    """pipeline.partition does not name a known partition method.

    The harness knows `balanced` (by cost), `measured` (by time), `uniform` (by layers), `parameters` and
    `type:REGEX` (by class name). With more than one stage it refuses any other word. DeepSpeed reads the key but does
    nothing with it; its default, `best`, means `balanced` here.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"partition": "fair"}}
    Right: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"partition": "balanced"}}
    """
    if partition_method(view.get("/pipeline/partition")) is None:
        yield unknown_word(view, "partition", PARTITION_FORMS, "does nothing with it")


def unknown_word(view: RunView, key: str, known: Iterable[str], deepspeed: str) -> Finding:
    """Return the finding for an unknown word in `pipeline`; a run with several stages refuses it."""
    pointer = f"/pipeline/{key}"
    refused = view.target == "harness" and view.pp_size > 1
    return Finding(
        pointer=pointer,
        message=f"unknown {key} {view.get(pointer)!r}",
        hint="use one of " + ", ".join(known),
        severity=Severity.ERROR if refused else None,
        deepspeed=deepspeed,
        on_value=True,
    )


@rule("DS605", "overlap-in-pipeline", Severity.WARNING, claim="elsewhere")
def overlap_in_pipeline(view: RunView) -> Iterator[Finding]:
    """overlap_comm is on, but the schedule computes weight gradients last, and nothing hides their reduction.

    A zero-bubble schedule defers weight gradients to the end of a step. With the other schedules the harness averages
    gradients over data-parallel ranks while the backward pass of the last micro-batch runs; DeepSpeed's own pipeline
    never does. New weights travel behind the next forward pass by default.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
           "pipeline": {"stages": 2, "schedule": "zero-bubble"},
           "zero_optimization": {"stage": 1, "overlap_comm": true}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
           "pipeline": {"stages": 2, "schedule": "zero-bubble"},
           "zero_optimization": {"stage": 1, "overlap_comm": false}}
    """
    overlaps = view.pp_size > 1 and view.zero_stage == 1 and view.on("/zero_optimization/overlap_comm")
    name = schedule_name(view.get("/pipeline/schedule"))
    defers = name is not None and SCHEDULES[name].defers
    if overlaps and (defers or view.target != "harness"):
        yield Finding(
            pointer="/zero_optimization/overlap_comm",
            message="overlap_comm hides no reduction of gradients with pipeline stages"
            + (f" and the schedule {name}" if defers else ""),
            hint="remove it",
            deepspeed="switches it off, with a warning in the log",
            on_value=True,
        )


@rule("DS606", "gradients-partitioned-alone", Severity.WARNING, claim="elsewhere")
def gradients_partitioned_alone(view: RunView) -> Iterator[Finding]:
    """Gradients between stages are partitioned over the tensor-parallel ranks, but activations are not.

    A stage then sends its gradient in two parts, but the previous stage, which sent its activation whole,
    waits for one whole tensor. grad_partitioned is on by default, so switching only pipe_partitioned off
    causes this.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
           "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2, "pipe_partitioned": false}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
           "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2, "pipe_partitioned": false,
           "grad_partitioned": false}}
    """
    whole = view.get("/pipeline/pipe_partitioned") is False
    if whole and view.get("/pipeline/grad_partitioned") is not False and view.tp_size > 1 and view.pp_size > 1:
        yield Finding(
            pointer="/pipeline/pipe_partitioned",
            message="with tensor parallelism, pipe_partitioned and grad_partitioned must both be on or both be off",
            hint="set pipeline.grad_partitioned to false as well",
            deepspeed="sends two tensors where the other stage expects one",
        )


@rule("DS607", "pipeline-without-a-pipeline", Severity.WARNING, claim="elsewhere", target="hf")
def pipeline_without_a_pipeline(view: RunView) -> Iterator[Finding]:
    """A pipeline section in a config for the HuggingFace Trainer, which has no pipeline.

    DeepSpeed reads the section for a model that is a PipelineModule. The HuggingFace Trainer hands it the whole
    model: every rank holds all layers and is data-parallel.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1}
    """
    for name in (
        *("stages", "partition", "schedule", "chunks_per_stage"),
        "activation_checkpoint_interval",
    ):
        value = view.get(f"/pipeline/{name}")
        if view.target == "hf" and value not in (None, AUTO, 0, False) and not (name == "stages" and value == 1):
            yield Finding(
                pointer=f"/pipeline/{name}",
                message=f"pipeline.{name} has no effect: the HuggingFace Trainer has no pipeline",
                hint="remove the section, or train with the harness",
                deepspeed="reads the section, but trains the whole model on every rank",
            )
            return
