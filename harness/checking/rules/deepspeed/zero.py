"""Rules about ZeRO: features that need a certain stage, and features that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules import edits
from harness.checking.rules.deepspeed.offload import ZERO, uses_zenflow
from harness.checking.rules.deepspeed.switches import is_other
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO, whole
from harness.wording import all_of, counted


def _acts(value: object, default: object) -> bool:
    """Return whether a value would have an effect if its key were read; a number counts even if it is the default."""
    return value not in (None, AUTO) and (is_other(value, default) if isinstance(value, bool) else True)


@rule("DS503", "key-of-another-stage", Severity.WARNING, claim="runs")
def key_of_another_stage(view: RunView) -> Iterator[Finding]:
    """A key that has no effect at this ZeRO stage.

    DeepSpeed accepts the key and ignores it. `stage3_*` keys, sub_group_size and ZeRO++ (zero_hpz_partition_size,
    zero_quantized_*) act at stage 3 only; round_robin_gradients and parameter_alignment at stages 1 and 2. Under AutoTP
    the HuggingFace Trainer needs stage3_gather_16bit_weights_on_model_save at every stage, to save a model at all.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}}
    """
    stage = view.zero_stage
    if stage is None or isinstance(view.get(ZERO), bool):
        return
    if view.target == "harness" and view.precision != "fp32":
        stage = max(stage, 1)  # the harness never runs 16 bits at stage 0
    for visit in view.visits:
        if not visit.pointer.startswith(f"{ZERO}/") or visit.key is None:
            continue
        stages = visit.key.spec.get("x-stages")
        if view.target != "harness" and view.tp_size > 1 and visit.key.spec.get("x-saves"):
            continue
        if stages and stage not in stages and _acts(visit.value, visit.key.spec.get("default")):
            where = all_of(stages)
            yield Finding(
                pointer=visit.pointer,
                message=f"{visit.name} has an effect at ZeRO stage {where} only, but the stage is {stage}",
                hint="remove it, or change the stage",
                deepspeed="ignores it",
                edits=edits.remove(view.document, visit.pointer),
            )


@rule("DS505", "no-gradient-norm", Severity.ERROR, claim="refuses")
def no_gradient_norm(view: RunView) -> Iterator[Finding]:
    """The gradient norm is disabled where DeepSpeed needs it.

    DeepSpeed can skip the norm at stages 1 and 2, and only without clipping. If gradient_clipping is absent, it clips
    at 1.0.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "compute_grad_norm": false}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "compute_grad_norm": false},
           "gradient_clipping": 0}
    """
    value = view.section(ZERO).get("compute_grad_norm", True)
    if value == AUTO or view.on(f"{ZERO}/compute_grad_norm") or value is True:
        return
    clipping = view.data.get("gradient_clipping", 1.0)
    clips = isinstance(clipping, (int, float)) and clipping > 0
    if view.zero_stage in (0, 3):
        message = f"compute_grad_norm is false at ZeRO stage {view.zero_stage}"
        hint, deepspeed = "use stage 1 or 2, or remove it", "refuses the config"
    elif clips:
        message = f"compute_grad_norm is false and gradients are clipped at {clipping}"
        hint, deepspeed = "set gradient_clipping to 0", "raises ValueError when the engine starts"
    else:
        return
    yield Finding(pointer=f"{ZERO}/compute_grad_norm", message=message, hint=hint, deepspeed=deepspeed)


@rule("DS506", "summed-gradients", Severity.ERROR, claim="refuses")
def summed_gradients(view: RunView) -> Iterator[Finding]:
    """gradient_allreduce_op is sum, with a feature that can only average gradients.

    ZeRO-3, ZenFlow and DeepCompile support only the mean.

    Wrong: {"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}
    Right: {"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}}
    """
    if str(view.get("/gradient_allreduce_op")).lower() != "sum":
        return
    reasons = (
        ("ZeRO-3", view.zero_stage == 3),
        ("ZenFlow", uses_zenflow(view)),
        ("DeepCompile", view.on("/compile/deepcompile")),
    )
    for name, holds in reasons:
        if holds:
            yield Finding(
                pointer="/gradient_allreduce_op",
                message=f"gradient_allreduce_op sum does not work with {name}",
                hint='use "mean"',
                deepspeed="raises ValueError",
                on_value=True,
            )
            return


@rule("DS507", "prescaled-gradients", Severity.ERROR, claim="engine")
def prescaled_gradients(view: RunView) -> Iterator[Finding]:
    """Gradients are scaled before they are reduced, which does not work with reduce-scatter.

    prescale_gradients and a gradient_predivide_factor other than 1 exclude reduce_scatter, which is on by
    default, at stages 2 and 3.

    Wrong: {"train_batch_size": 8, "prescale_gradients": true, "optimizer": {"type": "Adam",
           "params": {"torch_adam": true}}, "zero_optimization": {"stage": 2}}
    Right: {"train_batch_size": 8, "prescale_gradients": true, "optimizer": {"type": "Adam",
           "params": {"torch_adam": true}}, "zero_optimization": {"stage": 2, "reduce_scatter": false}}
    """
    scatters = view.section(ZERO).get("reduce_scatter", True)
    if view.zero_stage not in (2, 3) or not (scatters == AUTO or view.on(f"{ZERO}/reduce_scatter") or scatters is True):
        return
    if view.zero_stage == 2 and str(view.get("/gradient_allreduce_op")).lower() == "sum":
        return  # then nothing is divided
    for name, holds in (  # as Python compares them, whatever their type
        ("prescale_gradients", bool(view.get("/prescale_gradients"))),
        ("gradient_predivide_factor", view.data.get("gradient_predivide_factor", 1) != 1),
    ):
        if holds:
            yield Finding(
                pointer=f"/{name}",
                message=f"{name} does not work with reduce_scatter at ZeRO stage {view.zero_stage}",
                hint=f"remove {name}, or set zero_optimization.reduce_scatter to false",
                deepspeed="raises AssertionError when the engine starts",
            )


@rule("DS508", "legacy-stage-1", Severity.ERROR, claim="engine")
def legacy_stage_1(view: RunView) -> Iterator[Finding]:
    """The first implementation of ZeRO-1 is selected, which DeepSpeed has removed.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"torch_adam": true}},
           "zero_optimization": {"stage": 1, "legacy_stage1": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"torch_adam": true}},
           "zero_optimization": {"stage": 1}}
    """
    if view.on(f"{ZERO}/legacy_stage1") and view.zero_stage in (1, 2, 3):
        yield Finding(
            pointer=f"{ZERO}/legacy_stage1",
            message="legacy_stage1 selects an implementation that DeepSpeed has removed",
            hint="remove it",
            deepspeed="raises an exception when the engine starts",
            edits=edits.remove(view.document, f"{ZERO}/legacy_stage1"),
        )


@rule("DS510", "secondary-partition-does-not-fit", Severity.ERROR, claim="elsewhere", world_size=8)
def secondary_partition_does_not_fit(view: RunView) -> Iterator[Finding]:
    """The number of data-parallel ranks is not a multiple of zero_hpz_partition_size.

    The secondary copy of the parameters (ZeRO++ hpZ) is partitioned over groups of that many ranks, normally
    the ranks of one host.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}
    Right: {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    """
    size = view.size(f"{ZERO}/zero_hpz_partition_size") or 1
    ranks = view.dp_size
    if view.zero_stage == 3 and ranks and ranks % min(size, ranks):
        yield Finding(
            pointer=f"{ZERO}/zero_hpz_partition_size",
            message=f"{counted(ranks, 'data-parallel rank')} cannot be divided into groups of {size}",
            hint="use the number of ranks on a host",
            deepspeed="raises AssertionError when the engine starts",
            on_value=True,
        )


@rule("DS511", "quantized-weights-under-autocast", Severity.ERROR, claim="engine")
def quantized_weights_under_autocast(view: RunView) -> Iterator[Finding]:
    """torch_autocast and quantized weights (ZeRO++ qwZ) are both on, and exclude each other.

    Wrong: {"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "bfloat16"},
           "optimizer": {"type": "Adam", "params": {"torch_adam": true}}, "zero_optimization": {"stage": 3,
           "zero_quantized_weights": true}}
    Right: {"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "bfloat16"},
           "optimizer": {"type": "Adam", "params": {"torch_adam": true}}, "zero_optimization": {"stage": 3}}
    """
    if view.on("/torch_autocast/enabled") and view.on(f"{ZERO}/zero_quantized_weights"):
        yield Finding(
            pointer=f"{ZERO}/zero_quantized_weights",
            message="zero_quantized_weights does not work under torch_autocast",
            hint="replace torch_autocast with bf16, or remove zero_quantized_weights",
            deepspeed="raises AssertionError when the engine starts",
        )


@rule("DS516", "odd-allgather-bucket", Severity.ERROR, claim="engine")
def odd_allgather_bucket(view: RunView) -> Iterator[Finding]:
    """allgather_bucket_size is odd, but ZeRO-1 and ZeRO-2 align their buffers to two elements.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"torch_adam": true}},
           "zero_optimization": {"stage": 2, "allgather_bucket_size": 500000001}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"torch_adam": true}},
           "zero_optimization": {"stage": 2, "allgather_bucket_size": 500000000}}
    """
    size = whole(view.as_read(f"{ZERO}/allgather_bucket_size"))
    if view.zero_stage in (1, 2) and size is not None and size % 2:
        yield Finding(
            pointer=f"{ZERO}/allgather_bucket_size",
            message=f"allgather_bucket_size {size} is odd",
            hint=f"set allgather_bucket_size to {size + 1}",
            deepspeed="raises AssertionError when the engine starts",
            on_value=True,
        )
