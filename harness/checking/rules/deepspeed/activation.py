"""Rules about activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity

SECTION = "/activation_checkpointing"


def _severity(view: RunView) -> Severity | None:
    """Return ERROR if the harness will configure activation checkpointing, because DeepSpeed then raises."""
    recomputes = view.size("/pipeline/activation_checkpoint_interval") is not None
    return Severity.ERROR if view.target == "harness" and recomputes else None


@rule("DS701", "contiguous-without-partition", Severity.WARNING, claim="runs")
def contiguous_without_partition(view: RunView) -> Iterator[Finding]:
    """contiguous_memory_optimization without partition_activations.

    DeepSpeed copies activations into one buffer only after it has partitioned them. It raises an AssertionError when
    its activation checkpointing is configured; a program that never configures it gets no error.

    Wrong: {"train_batch_size": 8, "activation_checkpointing": {"contiguous_memory_optimization": true,
           "number_checkpoints": 4}}
    Right: {"train_batch_size": 8, "activation_checkpointing": {"contiguous_memory_optimization": true,
           "number_checkpoints": 4, "partition_activations": true}}
    """
    if view.on(f"{SECTION}/contiguous_memory_optimization") and not view.on(f"{SECTION}/partition_activations"):
        yield Finding(
            pointer=f"{SECTION}/contiguous_memory_optimization",
            message="contiguous_memory_optimization needs partition_activations",
            hint="set partition_activations to true, or remove contiguous_memory_optimization",
            severity=_severity(view),
            deepspeed="starts, and raises AssertionError when activation checkpointing is configured",
        )


@rule("DS702", "contiguous-without-number", Severity.WARNING, claim="runs")
def contiguous_without_number(view: RunView) -> Iterator[Finding]:
    """contiguous_memory_optimization without number_checkpoints.

    The size of the buffer depends on the number of checkpointed layers. Without it DeepSpeed raises an AssertionError
    when its activation checkpointing is configured.

    Wrong: {"train_batch_size": 8, "activation_checkpointing": {"contiguous_memory_optimization": true,
           "partition_activations": true}}
    Right: {"train_batch_size": 8, "activation_checkpointing": {"contiguous_memory_optimization": true,
           "partition_activations": true, "number_checkpoints": 4}}
    """
    number = view.section(SECTION).get("number_checkpoints")
    if view.on(f"{SECTION}/contiguous_memory_optimization") and number is None:
        yield Finding(
            pointer=f"{SECTION}/contiguous_memory_optimization",
            message="contiguous_memory_optimization needs number_checkpoints",
            hint="add number_checkpoints, the number of checkpointed layers, or remove contiguous_memory_optimization",
            severity=_severity(view),
            deepspeed="starts, and raises AssertionError when activation checkpointing is configured",
        )


@rule("DS703", "nothing-is-checkpointed", Severity.WARNING, claim="runs")
def nothing_is_checkpointed(view: RunView) -> Iterator[Finding]:
    """Options for activation checkpointing are set, but it is off.

    The section only sets options of deepspeed.checkpointing. With the harness, and in a PipelineModule,
    `pipeline.activation_checkpoint_interval` is the number of layers that are recomputed together; its default, 0, is
    off. With other programs the model's own code decides, so this is reported for `--target harness` only.

    Wrong: {"train_batch_size": 8, "activation_checkpointing": {"cpu_checkpointing": true}}
    Right: {"train_batch_size": 8, "activation_checkpointing": {"cpu_checkpointing": true},
           "pipeline": {"activation_checkpoint_interval": 1}}
    """
    section = view.section(SECTION)
    wanted = [name for name in section if view.on(f"{SECTION}/{name}") and name != "number_checkpoints"]
    if view.target == "harness" and wanted and not view.size("/pipeline/activation_checkpoint_interval"):
        yield Finding(
            pointer=SECTION,
            message=f"{wanted[0]} is on, but activation checkpointing is off",
            hint="set pipeline.activation_checkpoint_interval to 1, or remove activation_checkpointing",
            deepspeed="recomputes nothing unless the model's code asks for it",
        )
