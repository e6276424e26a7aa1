"""Rules about Muon, which orthogonalises whole matrices, and about optimizers that cannot train a model here."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.diagnostic import Severity
from harness.config.rule import Finding, rule
from harness.config.rules.optimizer import TYPE, kind
from harness.config.values import AUTO
from harness.config.view import RunView

_CANNOT_TRAIN = {
    "LBFGS": "it needs a closure that calls the model, which DeepSpeed does not give it",
    "SparseAdam": "it needs sparse gradients, but the model's are dense",
}


@rule(
    "DS808",
    "muon-with-tensor-parallelism",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2},'
    ' "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}',
    right='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2},'
    ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
    world_size=2,
)
def muon_with_tensor_parallelism(view: RunView) -> Iterator[Finding]:
    """Muon orthogonalises whole matrices, but a tensor-parallel rank holds only parts of them.

    The parts of an orthogonal matrix are not what one gets by orthogonalising each part, so the training would depend
    on the number of tensor-parallel ranks.
    """
    if kind(view) == "muon" and view.tensor > 1:
        yield Finding(
            pointer=TYPE,
            message=f"Muon needs whole matrices, but each of {view.tensor} tensor-parallel ranks holds a part",
            hint="use AdamW, or train without tensor parallelism",
            deepspeed="trains, but with different updates than on one rank",
            on_value=True,
        )


@rule(
    "DS809",
    "muon-norm-of-update",
    Severity.WARNING,
    claim="runs",
    wrong='{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Muon",'
    ' "params": {"lr": 1e-3}}}',
    right='{"train_batch_size": 8, "zero_optimization": {"stage": 0}, "optimizer": {"type": "Muon",'
    ' "params": {"lr": 1e-3}}}',
)
def muon_norm_of_update(view: RunView) -> Iterator[Finding]:
    """Under ZeRO the gradient norm is computed from Muon's update, not from the gradient.

    ZeRO orthogonalises gradients before it takes the norm. So they are clipped by another norm than at stage 0, and the
    norm that is reported says little about them.
    """
    if kind(view) == "muon" and view.zero_stage:
        yield Finding(
            pointer=TYPE,
            message=f"at ZeRO-{view.zero_stage} clipping and metrics use the norm of Muon's update",
            hint="set zero_optimization.stage to 0 to get the norm of the gradient",
            deepspeed="computes the norm after it has orthogonalised the matrices",
            on_value=True,
        )


@rule(
    "DS810",
    "optimizer-cannot-train",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}',
    right='{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2},'
    ' "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}',
)
def optimizer_cannot_train(view: RunView) -> Iterator[Finding]:
    """DeepSpeed can build this optimizer, but cannot train with it.

    Muon: not in bf16 at ZeRO stage 0 or with gradients accumulated in float32 at stage 1, and at stage 3 only with
    reduce_scatter false. LBFGS wants to call the model itself, SparseAdam wants sparse gradients.
    """
    name = kind(view)
    reason, hint = _CANNOT_TRAIN.get(name or ""), "use AdamW"
    if name == "muon" and view.target == "harness":
        reason, hint = _muon_reason(view)
    if reason:
        yield Finding(
            pointer=TYPE,
            message=f"{view.get(TYPE)} cannot train here: {reason}",
            hint=hint,
            deepspeed="raises ValueError or RuntimeError when the engine starts, or at the first step",
            on_value=True,
        )


def _muon_reason(view: RunView) -> tuple[str | None, str]:
    """Why DeepSpeed has no Muon for this precision and stage (None: it has), and what to do."""
    stage, zero = view.zero_stage, view.section("/zero_optimization")
    in_fp32 = view.get("/data_types/grad_accum_dtype") not in (None, AUTO, "bf16")
    if view.precision == "bf16" and (stage == 0 or (stage == 1 and in_fp32)):
        return "in bf16 it needs ZeRO", "set zero_optimization.stage to 2"
    if stage == 3 and zero.get("reduce_scatter", True) not in (False, AUTO):
        return "at ZeRO-3 it needs whole gradients", "set zero_optimization.reduce_scatter to false"
    return None, ""
