"""Rules about when data-parallel ranks average gradients, and in how many bits."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.deepspeed.offload import ZERO, offloads
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.layout_keys import GRADIENT_BITS, ONE_REDUCTION
from harness.config.values.pointers import AUTO, name_of

_IGNORES = "ignores the section, and sends gradients as they are"
_ONCE = name_of(ONE_REDUCTION)


@rule("DS318", "gradients-that-cannot-be-compressed", Severity.ERROR, claim="runs")
def gradients_that_cannot_be_compressed(view: RunView) -> Iterator[Finding]:
    """gradient_compression is set, but the harness cannot compress with these settings.

    The harness compresses whole gradients once a step, at ZeRO stages 0 and 1, in 8 or 4 bits. ZeRO-2 and
    ZeRO-3 reduce gradients in parts, in every backward pass. At stage 1 `overlap_comm`, `contiguous_gradients: false`
    and an offloaded optimizer reduce or move gradients before they are complete. If experts are distributed among
    data-parallel ranks, their gradients are summed over other ranks than the rest.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "gradient_compression": {"bits": 8}}
    Right: {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "gradient_compression": {"bits": 8}}
    """
    if view.target != "harness" or not view.has(GRADIENT_BITS):
        return
    if view.get(GRADIENT_BITS) not in (AUTO, 0, 4, 8) or view.get(GRADIENT_BITS) is False:
        yield Finding(
            pointer=GRADIENT_BITS,
            message="gradient_compression.bits is not 8, 4, 0 or auto",
            hint='write 8, 4, 0 (off) or "auto"',
            deepspeed=_IGNORES,
            on_value=True,
        )
    elif view.gradient_bits != 0 and (obstacle := _obstacle(view)):
        yield Finding(
            pointer=GRADIENT_BITS,
            message=f"gradients cannot be compressed with {obstacle[0]}",
            hint=f"{obstacle[1]}, or remove gradient_compression",
            deepspeed=_IGNORES,
        )


def _obstacle(view: RunView) -> tuple[str, str] | None:
    """Return the setting that prevents compression, and the remedy."""
    stage = view.zero_stage or 0
    if view.exchanges_tokens:
        return "experts that are distributed over data-parallel ranks", "remove expert_parallel"
    if stage > 1:
        return f"ZeRO stage {stage}", "set zero_optimization.stage to 1 or 0"
    if stage == 1 and offloads(view, "offload_optimizer"):
        return "an offloaded optimizer", "remove offload_optimizer"
    if stage == 1 and view.on(f"{ZERO}/overlap_comm"):
        return "overlap_comm", "set overlap_comm to false"
    if stage == 1 and view.as_read(f"{ZERO}/contiguous_gradients") is False:
        return "contiguous_gradients false", "remove contiguous_gradients"
    return None


@rule("DS319", "gradient-compression-without-effect", Severity.WARNING, claim="elsewhere", world_size=1)
def gradient_compression_without_effect(view: RunView) -> Iterator[Finding]:
    """gradient_compression is set, but has no effect.

    With one data-parallel rank there is nothing to send. Without the harness no program reads the section.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_compression": {"bits": 8}}
    Right: {"train_micro_batch_size_per_gpu": 1}
    """
    asked = view.get(GRADIENT_BITS) not in (None, 0)
    if asked and (view.target != "harness" or view.dp_size == 1):
        alone = view.target == "harness"
        yield Finding(
            pointer=GRADIENT_BITS,
            message="gradient_compression has no effect: "
            + ("there is one data-parallel rank" if alone else "only the harness knows it"),
            hint="remove it" if alone else "remove it, or train with the harness",
            deepspeed=_IGNORES,
        )


@rule("DS326", "gradients-that-cannot-wait", Severity.ERROR, claim="runs")
def gradients_that_cannot_wait(view: RunView) -> Iterator[Finding]:
    """gradient_reduction.once_per_step is set, but gradients cannot wait for the last micro-batch, or do so anyway.

    ZeRO-2 averages gradients in each micro-batch, so that a rank keeps only its part of them. With the key it averages
    their sum once a step, and each rank keeps all gradients. ZeRO-3 and an offloaded optimizer have no room for them.
    ZeRO-0 and ZeRO-1 reduce once a step anyway.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_reduction": {"once_per_step": true}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_reduction": {"once_per_step": true}}
    """
    if view.get(ONE_REDUCTION) is not True or view.target != "harness":
        return
    stage = view.zero_stage or 0
    if stage == 2 and not offloads(view, "offload_optimizer"):
        return
    if stage < 2:
        message = f"{_ONCE} has no effect at ZeRO stage {stage}, which reduces once a step anyway"
        severity = "WARNING"
    elif stage == 3:
        message = f"{_ONCE}: ZeRO stage 3 reduces gradients in each micro-batch"
        severity = "ERROR"
    else:
        message = f"{_ONCE}: an offloaded optimizer takes gradients from each micro-batch"
        severity = "ERROR"
    yield Finding(
        pointer=ONE_REDUCTION,
        message=message,
        hint="remove it",
        deepspeed="ignores the section, and reduces as the stage does",
        severity=Severity[severity],
    )
