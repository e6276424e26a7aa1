"""Rules about the layout: pipeline stages x tensor-parallel ranks x data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.diagnostic import Severity
from harness.config.rule import Finding, rule
from harness.config.values import AUTO
from harness.config.view import RunView


@rule(
    "DS311",
    "layout-does-not-fit",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}}',
    right='{"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 3}}',
    world_size=3,
)
def layout_does_not_fit(view: RunView) -> Iterator[Finding]:
    """The number of ranks is no multiple of pipeline stages x tensor-parallel ranks.

    Every data-parallel copy of the model takes stages x tensor-parallel ranks; what is left over would be
    idle, and the harness refuses to start so. It is checked with `--world_size`, and at the start of a run.
    """
    copy = view.stages * view.tensor
    if view.target == "harness" and view.world_size is not None and view.world_size % copy:
        pointer = "/pipeline/stages" if view.stages > 1 else "/tensor_parallel/autotp_size"
        yield Finding(
            pointer=pointer,
            message=f"{view.world_size} ranks cannot be divided into copies of {view.stages} pipeline stages"
            f" x {view.tensor} tensor-parallel ranks",
            hint=f"start a multiple of {copy} ranks, or change the layout",
            deepspeed="does not look at the layout here",
            on_value=True,
        )


@rule(
    "DS312",
    "sequence-parallel-in-the-harness",
    Severity.WARNING,
    claim="runs",
    wrong='{"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}',
    right='{"train_micro_batch_size_per_gpu": 1}',
)
def sequence_parallel_in_the_harness(view: RunView) -> Iterator[Finding]:
    """A size for sequence parallelism, which the harness does not lay out.

    DeepSpeed needs the model's attention to be rewritten for it (Ulysses); a model that is not, computes
    each sequence on every rank.
    """
    size = view.size("/sequence_parallel_size") or 1
    if view.target == "harness" and size > 1:
        yield Finding(
            pointer="/sequence_parallel_size",
            message=f"sequence_parallel_size {size}: the harness lays out pipeline, tensor and data parallelism only",
            hint="remove it",
            deepspeed="divides the number of data-parallel ranks by it",
        )


@rule(
    "DS313",
    "autotp-option-in-the-harness",
    Severity.WARNING,
    claim="runs",
    wrong='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": true}}',
    right='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1}}',
)
def autotp_option_in_the_harness(view: RunView) -> Iterator[Finding]:
    """An option of DeepSpeed's AutoTP, which does not run under the harness.

    The harness cuts the layers itself, by the plan that the model declares, and takes nothing but
    autotp_size from this section; it is not handed on to DeepSpeed.
    """
    if view.target != "harness":
        return
    for visit in view.visits:
        if visit.parent != "/tensor_parallel" or visit.key is None or visit.name in ("autotp_size", "dtype"):
            continue
        if visit.value not in (AUTO, None, visit.key.spec.get("default")):
            yield Finding(
                pointer=visit.pointer,
                message=f"{visit.name} is an option of AutoTP, which the harness does not use",
                hint="remove it; autotp_size is all that the harness reads here",
                deepspeed="is not given this section by the harness",
            )
