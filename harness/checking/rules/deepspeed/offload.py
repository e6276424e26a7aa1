"""Rules about offloading: what ZeRO keeps in CPU memory or on NVMe, and at which stage it can."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.checking.schema.coercion import as_float
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO

ZERO = "/zero_optimization"


def offloads(view: RunView, section: str) -> bool:
    """Return whether a section moves something off the accelerator."""
    return view.as_read(f"{ZERO}/{section}/device") in ("cpu", "nvme")


def uses_zenflow(view: RunView) -> bool:
    """Return whether ZenFlow is on: its section, even an empty one, is its switch."""
    return isinstance(view.get(f"{ZERO}/zenflow"), dict)


@rule("DS501", "offload-param-below-stage-3", Severity.WARNING, claim="runs")
def offload_param_below_stage_3(view: RunView) -> Iterator[Finding]:
    """offload_param is set at a ZeRO stage that does not partition parameters.

    DeepSpeed accepts this and keeps the parameters on the device. The harness refuses it, because it would not free the
    memory that you expect.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    """
    if offloads(view, "offload_param") and view.zero_stage in (0, 1, 2):
        name = "offload_param" if view.has(f"{ZERO}/offload_param") else "cpu_offload_param"
        yield Finding(
            pointer=f"{ZERO}/offload_param",
            message=f"{name} works at ZeRO-3 only, but the stage is {view.zero_stage}",
            hint=f"set stage to 3, or remove {name}",
            severity=Severity.ERROR if view.target == "harness" else None,
            deepspeed="ignores it: the parameters stay on the accelerator",
        )


@rule("DS502", "nvme-without-path", Severity.ERROR, claim="engine")
def nvme_without_path(view: RunView) -> Iterator[Finding]:
    """Offloading to NVMe without nvme_path, the folder to write to.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
           "optimizer": {"type": "Adam", "params": {"torch_adam": true}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme",
           "nvme_path": "/local_nvme"}}, "optimizer": {"type": "Adam", "params": {"torch_adam": true}}}
    """
    for section in ("offload_param", "offload_optimizer"):
        here = f"{ZERO}/{section}"
        path = view.get(f"{here}/nvme_path")
        if view.get(f"{here}/device") == "nvme" and path in (None, AUTO) and view.zero_stage == 3:
            yield Finding(
                pointer=f"{here}/device",
                message=f"{section} uses NVMe, but nvme_path is missing",
                hint="add nvme_path, a folder on the NVMe device",
                deepspeed="ends with an error when the engine starts",
                on_value=True,
            )


@rule("DS504", "partial-offload-below-stage-3", Severity.ERROR, claim="refuses", target="deepspeed")
def partial_offload_below_stage_3(view: RunView) -> Iterator[Finding]:
    """offload_optimizer.ratio offloads a part of the optimizer state, which works at ZeRO-3 only.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",
           "ratio": 0.5}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu",
           "ratio": 0.5}}}
    """
    ratio = as_float(view.section(f"{ZERO}/offload_optimizer").get("ratio", 1.0))
    if ratio is not None and ratio < 1 and view.zero_stage in (0, 1, 2):
        yield Finding(
            pointer=f"{ZERO}/offload_optimizer/ratio",
            message=f"offload_optimizer.ratio {ratio} works at ZeRO-3 only, but the stage is {view.zero_stage}",
            hint="remove ratio" if view.target == "harness" else "set stage to 3, or remove ratio",
            deepspeed="refuses the config",
            on_value=True,
        )


@rule("DS509", "contiguous-gradients-forced", Severity.WARNING, claim="runs")
def contiguous_gradients_forced(view: RunView) -> Iterator[Finding]:
    """contiguous_gradients is off, but offloading turns it on again.

    At stages 1 and 2 DeepSpeed copies gradients to the CPU through the contiguous buffer, so it always allocates that
    buffer.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "contiguous_gradients": false,
           "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "contiguous_gradients": true,
           "offload_optimizer": {"device": "cpu"}}}
    """
    off = view.get(f"{ZERO}/contiguous_gradients") is False
    if off and view.zero_stage in (1, 2) and offloads(view, "offload_optimizer"):
        yield Finding(
            pointer=f"{ZERO}/contiguous_gradients",
            message="contiguous_gradients false has no effect with an offloaded optimizer",
            hint="remove it",
            deepspeed="switches contiguous_gradients on",
            on_value=True,
        )


@rule("DS512", "offload-optimizer-without-effect", Severity.WARNING, claim="runs")
def offload_optimizer_without_effect(view: RunView) -> Iterator[Finding]:
    """offload_optimizer names a device to which this ZeRO stage does not offload.

    Stages 1 to 3 can offload the optimizer state to the CPU, and only stage 3 to NVMe. Otherwise DeepSpeed keeps it
    where the parameters are.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
           "zero_force_ds_cpu_optimizer": false}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 0}}
    """
    device = view.as_read(f"{ZERO}/offload_optimizer/device")
    stages = {"cpu": "1 to 3", "nvme": "3"}.get(device) if isinstance(device, str) else None
    idle = view.zero_stage == 0 or (device == "nvme" and view.zero_stage in (1, 2))
    if stages is not None and idle:
        yield Finding(
            pointer=f"{ZERO}/offload_optimizer",
            message=f"offload_optimizer to {device} works at ZeRO stage {stages}, but the stage is {view.zero_stage}",
            hint="change the stage" + (', or set the device to "cpu"' if device == "nvme" and view.zero_stage else ""),
            deepspeed="ignores it: the optimizer state stays on the accelerator",
        )
