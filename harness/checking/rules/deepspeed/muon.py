"""Rules about Muon, which orthogonalises whole matrices, and about optimizers that cannot train a model here."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.deepspeed.optimizer import PARAMS, TYPE, about_type, instead, kind
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO
from harness.optimizers import DEFAULT, OPTIMIZERS

_MUON = OPTIMIZERS["Muon"]


@rule("DS808", "muon-with-tensor-parallelism", Severity.ERROR, claim="elsewhere", world_size=2, target="deepspeed")
def muon_with_tensor_parallelism(view: RunView) -> Iterator[Finding]:
    """Muon orthogonalises whole matrices, but a tensor-parallel rank of DeepSpeed holds only parts of them.

    Orthogonalising each part does not give the parts of the orthogonalised matrix, so the training would depend on the
    number of tensor-parallel ranks. The harness gathers each matrix first; with it this is not reported.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "Muon",
           "params": {"lr": 0.001}}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "SGD",
           "params": {"lr": 0.001}}}
    """
    if kind(view) is _MUON and view.tp_size > 1 and view.target != "harness":
        yield about_type(
            message=f"Muon needs whole matrices, but each of {view.tp_size} tensor-parallel ranks holds a part",
            hint=f"{instead(view, DEFAULT.name)}, or train without tensor parallelism",
            deepspeed="trains, but with different updates than on one rank",
        )


@rule("DS809", "muon-norm-of-update", Severity.WARNING, claim="runs", target="deepspeed")
def muon_norm_of_update(view: RunView) -> Iterator[Finding]:
    """Under DeepSpeed's ZeRO the gradient norm is computed from Muon's update, not from the gradient.

    DeepSpeed orthogonalises gradients before it computes the norm. So it clips by another norm than at stage 0, and the
    reported norm says little about the gradients. The harness orthogonalises after clipping; with it this is not
    reported.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Muon",
           "params": {"lr": 0.001}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 0}, "optimizer": {"type": "Muon",
           "params": {"lr": 0.001}}}
    """
    if kind(view) is _MUON and view.zero_stage and view.target != "harness":
        yield about_type(
            message=f"at ZeRO-{view.zero_stage} clipping and metrics use the norm of Muon's update",
            hint="set zero_optimization.stage to 0 to get the norm of the gradient",
            deepspeed="computes the norm after it has orthogonalised the matrices",
        )


@rule("DS810", "optimizer-cannot-train", Severity.ERROR, claim="elsewhere")
def optimizer_cannot_train(view: RunView) -> Iterator[Finding]:
    """DeepSpeed can build this optimizer, but cannot train with it.

    LBFGS calls the model itself, and SparseAdam takes sparse gradients. At ZeRO-3 DeepSpeed's own Muon needs whole
    gradients (`reduce_scatter: false`). The harness's Muon cannot orthogonalise attention heads separately
    (`per_head_muon`).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SparseAdam", "params": {"lr": 0.001}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.001}}}
    """
    optimizer = kind(view)
    if optimizer is None:
        return
    reason = optimizer.cannot_train
    hint = instead(view, DEFAULT.name)
    if optimizer is _MUON:
        reason, hint = _muon_reason(view)
    if reason:
        yield about_type(
            message=f"{view.get(TYPE)} cannot train here: {reason}",
            hint=hint,
            deepspeed="raises ValueError or RuntimeError when the engine starts, or at the first step",
        )


def _muon_reason(view: RunView) -> tuple[str, str]:
    """Return why Muon cannot run with this config ("": it can), and what to do."""
    method = view.get(f"{PARAMS}/ns_method")
    if method not in (None, "gram", "standard"):
        return f"ns_method is {method}", 'set ns_method to "gram" or "standard"'
    if view.target == "harness":
        if view.on(f"{PARAMS}/per_head_muon"):
            return "per_head_muon needs a model that is not cut into layers", "remove per_head_muon"
        return "", ""
    if view.zero_stage == 3 and view.section("/zero_optimization").get("reduce_scatter", True) not in (False, AUTO):
        return "at ZeRO-3 it needs gradients that are whole", "set zero_optimization.reduce_scatter to false"
    return "", ""
