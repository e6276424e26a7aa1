"""Rules about the pipeline schedule and the number of model chunks per stage."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.layout.pipeline import unknown_word
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.layout_keys import CHUNKS, schedule_name
from harness.schedules import DEFAULT, INTERLEAVED, SCHEDULES
from harness.wording import counted


@rule("DS608", "unknown-schedule", Severity.WARNING, claim="runs")
def unknown_schedule(view: RunView) -> Iterator[Finding]:
    """pipeline.schedule does not name a schedule of the harness.

    docs/layouts.md has a table of the schedules; the default, 1F1B, is DeepSpeed's own. With more than one stage the
    harness refuses any other word, and lists those that it knows. DeepSpeed reads the key but does nothing with it: it
    always runs 1F1B. In a config for another program, any other schedule than 1F1B is told.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"schedule": "zb-h2"}}
    Right: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"schedule": "zero-bubble"}}
    """
    name = schedule_name(view.get("/pipeline/schedule"))
    if name is None:
        yield unknown_word(view, "schedule", tuple(SCHEDULES), "does nothing with it, and runs 1F1B")
    elif view.target != "harness" and name != DEFAULT:
        yield Finding(
            pointer="/pipeline/schedule",
            message=f"{name} is a schedule of the harness",
            hint="remove it, or train with the harness",
            deepspeed="does nothing with it, and runs 1F1B",
            on_value=True,
        )


@rule("DS609", "zero-bubble-with-recomputation", Severity.INFO, claim="elsewhere")
def zero_bubble_with_recomputation(view: RunView) -> Iterator[Finding]:
    """A zero-bubble schedule together with activation checkpointing.

    Until a deferred weight gradient is computed, its layer's input and the gradient of its layer's output stay in
    memory. Under `zero-bubble` stage s (from 0) keeps them for s micro-batches, although activation checkpointing frees
    the other activations. Other schedules that defer weight gradients do the same. Results do not change, but some
    stages save less memory than under 1F1B.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2,
           "schedule": "zero-bubble", "activation_checkpoint_interval": 1}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2,
           "schedule": "zero-bubble"}}
    """
    schedule = schedule_name(view.get("/pipeline/schedule"))
    defers = schedule is not None and SCHEDULES[schedule].defers and view.target == "harness"
    interval = view.size("/pipeline/activation_checkpoint_interval")
    if defers and interval and view.pp_size > 1:
        yield Finding(
            pointer="/pipeline/schedule",
            message=f"{schedule} keeps the inputs of linear layers for up to "
            f"{counted(view.pp_size - 1, 'micro-batch', 'micro-batches')}, which activation checkpointing would free",
            hint=f"use the schedule {DEFAULT} if memory runs short",
            deepspeed="does nothing with the schedule, and runs 1F1B",
            on_value=True,
        )


@rule("DS610", "chunks-of-another-schedule", Severity.WARNING, claim="runs")
def chunks_of_another_schedule(view: RunView) -> Iterator[Finding]:
    """pipeline.chunks_per_stage is a number of model chunks that the schedule does not support.

    `interleaved` takes 2 or more model chunks per stage; 2 is the default. A schedule of a folded model, such as
    `zero-bubble-v`, has 2, every other schedule has 1. With more than one stage the harness refuses any other number.
    DeepSpeed reads the key but does nothing with it.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2,
           "chunks_per_stage": 4}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2,
           "schedule": "interleaved", "chunks_per_stage": 4}}
    """
    asked = view.size(CHUNKS)
    schedule = schedule_name(view.get("/pipeline/schedule"))
    several = schedule is not None and SCHEDULES[schedule].chunks is None
    if asked is None or schedule is None or view.target != "harness" or view.pp_size == 1:
        return
    if asked < 2 if several else asked != view.chunks.per_stage:
        yield Finding(
            pointer=CHUNKS,
            message=f"the schedule {schedule} has "
            + (
                "2 model chunks a stage or more"
                if several
                else f"{counted(view.chunks.per_stage, 'model chunk')} a stage"
            ),
            hint="write 2 or more, or remove the key"
            if several
            else f'remove the key, or set pipeline.schedule to "{INTERLEAVED}", which takes it',
            severity=Severity.ERROR,
            deepspeed="does nothing with it",
            on_value=True,
        )
