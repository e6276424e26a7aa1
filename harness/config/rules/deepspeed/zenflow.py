"""Rules about ZenFlow, which updates the important gradients on the accelerator and the rest on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.rules.deepspeed.optimizer import PARAMS, TYPE, instead, kind
from harness.config.rules.rule import Finding, rule
from harness.config.rules.view import RunView
from harness.config.schema import signatures
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO, whole
from harness.wording import one_of

ZERO = "/zero_optimization"
ZENFLOW = f"{ZERO}/zenflow"


def _is_on(view: RunView) -> bool:
    return view.get(ZENFLOW) not in (None, AUTO)


@rule("DS513", "zenflow-without-offload", Severity.ERROR, claim="engine")
def zenflow_without_offload(view: RunView) -> Iterator[Finding]:
    """ZenFlow is on, but ZeRO is off, or its optimizer is not offloaded to the CPU.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "zenflow": {}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    """
    if not _is_on(view):
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
    if counts_steps and select is not None and update is not None and 0 != select < update:
        yield Finding(
            pointer=f"{ZENFLOW}/update_interval",
            message=f"update_interval is {update}, but select_interval is only {select}",
            hint=f"set update_interval to {select}, or select_interval to {update}",
            deepspeed="raises ValueError when the engine starts",
            on_value=True,
        )


@rule("DS515", "zenflow-with-another-optimizer", Severity.ERROR, claim="engine")
def zenflow_with_another_optimizer(view: RunView) -> Iterator[Finding]:
    """ZenFlow hands the optimizer's parameters to its own AdamW and to its Adam on the CPU, and one of them lacks one.

    So the file must name Adam or AdamW, and only parameters that both have.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": true}},
           "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
           "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    """
    name = kind(view)
    if not _is_on(view) or (name is None and view.target == "harness"):  # which then leaves zenflow out, and says so
        return
    if name not in ("adam", "adamw"):
        yield Finding(
            pointer=TYPE if name is not None else ZENFLOW,
            message=f"zenflow works with Adam and AdamW only{f', not with {name}' if name is not None else ''}",
            hint='set optimizer.type to "AdamW", or remove zenflow'
            if name is None
            else f"{instead(view, 'AdamW')}, or remove zenflow",
            deepspeed="fails when the engine starts, or at the first step",
            on_value=True,
        )
        return
    both = set(signatures()["torch_optimizers"]["AdamW"].params)
    both &= set(signatures()["deepspeed_optimizers"]["DeepSpeedCPUAdam"].params)
    for param in view.section(PARAMS):
        if param not in both:
            yield Finding(
                pointer=f"{PARAMS}/{param}",
                message=f"zenflow's optimizers have no parameter {param}",
                hint="remove it",
                deepspeed=f"raises TypeError when the engine starts; it passes on {one_of(sorted(both))}",
            )
