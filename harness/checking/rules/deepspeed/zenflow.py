"""Rules about ZenFlow, which updates the important gradients on the accelerator and the rest on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.deepspeed.offload import ZERO, uses_zenflow
from harness.checking.rules.deepspeed.optimizer import PARAMS, TYPE, instead, kind, stated
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import whole
from harness.optimizers import DEFAULT
from harness.wording import all_of

ZENFLOW = f"{ZERO}/zenflow"


@rule("DS513", "zenflow-without-offload", Severity.ERROR, claim="engine")
def zenflow_without_offload(view: RunView) -> Iterator[Finding]:
    """ZenFlow is on, but ZeRO is off, or its optimizer is not offloaded to the CPU.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "zenflow": {}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    """
    if not uses_zenflow(view):
        return
    is_offloaded = view.as_read(f"{ZERO}/offload_optimizer/device") == "cpu"
    if view.zero_stage == 0:
        missing, hint = "ZeRO, but the stage is 0", "set zero_optimization.stage to 1, 2 or 3, or remove zenflow"
    elif not is_offloaded:
        missing, hint = "offload_optimizer on the CPU", 'set offload_optimizer.device to "cpu", or remove zenflow'
    else:
        return
    yield Finding(
        pointer=ZENFLOW,
        message=f"zenflow needs {missing}",
        hint=hint,
        deepspeed="fails when the engine starts, or at the first step",
    )


@rule("DS514", "zenflow-updates-after-selections", Severity.ERROR, claim="engine")
def zenflow_updates_after_selections(view: RunView) -> Iterator[Finding]:
    """ZenFlow would update the rest of the gradients less often than it selects the important ones.

    Both intervals count steps if `select_strategy` is "step". `update_interval` must not be the larger one.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
           "zenflow": {"select_strategy": "step", "select_interval": 2, "update_interval": 4}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
           "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4}}}
    """
    select, update = (whole(view.as_read(f"{ZENFLOW}/{name}_interval")) for name in ("select", "update"))
    counts_steps = view.as_read(f"{ZENFLOW}/select_strategy") == "step"
    if counts_steps and select is not None and update is not None and 0 < select < update:
        yield Finding(
            pointer=f"{ZENFLOW}/update_interval",
            message=f"update_interval is {update}, but select_interval is only {select}",
            hint=f"set update_interval to {select}, or select_interval to {update}",
            deepspeed="raises ValueError when the engine starts",
            on_value=True,
        )


@rule("DS515", "zenflow-with-another-optimizer", Severity.ERROR, claim="engine")
def zenflow_with_another_optimizer(view: RunView) -> Iterator[Finding]:
    """ZenFlow is on with another optimizer than Adam and AdamW, or with a parameter that one of its optimizers lacks.

    It passes the parameters to torch's AdamW for the important gradients, and to DeepSpeed's CPU Adam for the rest.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": true}},
           "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    """
    optimizer = kind(view)
    name = stated(view)
    if not uses_zenflow(view):
        return
    if optimizer is not None and optimizer.family == DEFAULT.family:
        yield from _unknown_to_zenflow(view)
    elif name is not None or view.target != "harness":  # which uses its default, without ZenFlow, and says so
        named = name is not None
        yield Finding(
            pointer=TYPE if named else ZENFLOW,
            message="zenflow works with Adam and AdamW only" + (f", not with {name}" if named else ""),
            hint=(instead(view, DEFAULT.name) if named else f'set optimizer.type to "{DEFAULT.name}"')
            + ", or remove zenflow",
            deepspeed="fails when the engine starts, or at the first step",
            on_value=True,
        )


def _unknown_to_zenflow(view: RunView) -> Iterator[Finding]:
    """Yield a finding for each parameter that ZenFlow cannot pass on."""
    important, rest = (DEFAULT.class_of({}, by_torch=by_torch, offloaded=True) for by_torch in (True, False))
    both = {*(important.options or ())} & {*(rest.options or ())}
    for param in view.section(PARAMS):
        if param not in both:
            yield Finding(
                pointer=f"{PARAMS}/{param}",
                message=f"zenflow's optimizers have no parameter {param}",
                hint="remove it",
                deepspeed=f"raises TypeError when the engine starts; it passes on {all_of(sorted(both))}",
            )
