"""Rules about precision: fp16, bf16, loss scaling, and the dtypes of gradients, master weights and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules import edits
from harness.checking.rules.deepspeed.offload import offloads
from harness.checking.rules.deepspeed.optimizer import cpu_adam_advice, is_tested_with_zero
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.syntax.values import show
from harness.checking.rules.view import RunView
from harness.checking.schema import torch_modules
from harness.checking.schema.coercion import as_float
from harness.config.text.diagnostic import Severity
from harness.config.values.coercion import as_int
from harness.config.values.pointers import AUTO
from harness.optimizers import DEFAULT
from harness.spelling import nearest

FLOAT16 = ("torch.float16", "fp16", "float16", "half")
_KINDS = {
    "fp16": FLOAT16,
    "bf16": ("torch.bfloat16", "bf16", "bfloat16"),
    "fp32": ("torch.float32", "fp32", "float32", "float"),
    "int8": ("torch.int8", "int8"),
}
_BF16_MASTERS = "bf16_master_weights_and_grads"
_MODULES = "/torch_autocast/lower_precision_safe_modules"


def _kind(name: object) -> str | None:
    """fp16, bf16, fp32 or int8 for any of their names."""
    return next((kind for kind, names in _KINDS.items() if name in names), None)


@rule("DS401", "fp16-and-bf16", Severity.ERROR, claim="refuses")
def fp16_and_bf16(view: RunView) -> Iterator[Finding]:
    """fp16 and bf16 are both enabled; a model has one precision.

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": false}, "bf16": {"enabled": true}}
    """
    if view.on("/fp16/enabled") and view.on(f"/{view.bf16_section}/enabled"):
        yield Finding(
            pointer="/fp16/enabled",
            message="fp16 and bf16 are both enabled",
            hint="keep bf16 if the device supports it: it needs no loss scaling",
            deepspeed="raises AssertionError",
            on_value=True,
        )


@rule("DS402", "loss-scale-in-bf16", Severity.ERROR, claim="refuses")
def loss_scale_in_bf16(view: RunView) -> Iterator[Finding]:
    """A loss scale is set for bf16.

    bfloat16 has the range of float32, so the loss needs no scale, and DeepSpeed refuses the key.

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}}
    """
    for section in ("/bf16", "/bfloat16"):
        if view.get(f"{section}/loss_scale") not in (None, AUTO):
            yield Finding(
                pointer=f"{section}/loss_scale",
                message="bf16 has no loss scale",
                hint="remove it",
                deepspeed="refuses the config: extra inputs are not permitted",
                edits=edits.remove(view.document, f"{section}/loss_scale"),
            )


@rule("DS403", "impossible-loss-scaling", Severity.ERROR, claim="refuses")
def impossible_loss_scaling(view: RunView) -> Iterator[Finding]:
    """loss_scale_window or min_loss_scale is 0 or less, or a setting of the loss scale is true or false.

    Adaptive loss scaling divides the number of steps by the window, and a scale that may fall to 0 makes every gradient
    0. With a fixed loss_scale the two are not used, and any number is accepted.

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true, "min_loss_scale": 0}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": true, "min_loss_scale": 1}}
    """
    fp16 = view.section("/fp16")
    adaptive = view.on("/fp16/enabled") and (as_float(fp16.get("loss_scale", 0)) or 0) == 0
    for name in ("loss_scale_window", "min_loss_scale", "loss_scale"):
        value = fp16.get(name)
        number = as_int(value) if name != "loss_scale" and value not in (None, AUTO) else None
        if isinstance(value, bool) or (adaptive and number is not None and number <= 0):
            yield Finding(
                pointer=f"/fp16/{name}",
                message=f"fp16.{name} is {str(value).lower()}",
                hint="use a whole number of at least 1" if name != "loss_scale" else "use 0 for an adaptive loss scale",
                deepspeed="refuses the config",
                on_value=True,
            )


@rule("DS404", "low-precision-masters-without-zero", Severity.ERROR, claim="refuses")
def low_precision_masters_without_zero(view: RunView) -> Iterator[Finding]:
    """Master weights or optimizer states in 16 bits, without ZeRO or without its CPU Adam.

    Only ZeRO's optimizers can keep them in 16 bits. Master weights in 16 bits need bf16_optimizer_states, or else an
    optimizer state that DeepSpeed's CPU Adam updates in the host's memory; with offload_optimizer they always need that
    Adam. bf16_optimizer_states needs bf16_master_weights_and_grads.

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
           "bf16_optimizer_states": true}, "zero_optimization": {"stage": 1}}
    """
    bf16 = f"/{view.bf16_section}"
    masters = f"{bf16}/{_BF16_MASTERS}"
    states = f"{bf16}/bf16_optimizer_states"
    for pointer in ("/fp16/fp16_master_weights_and_grads", masters, states):
        missing: tuple[str, str] | None = None
        if not view.on(pointer):
            continue
        if view.zero_stage == 0:
            missing = ("ZeRO, but the stage is 0", "set zero_optimization.stage to 1, 2 or 3")
        elif pointer == states and not view.on(masters):
            missing = (_BF16_MASTERS, f"enable {_BF16_MASTERS} too")
        elif pointer != states:
            missing = _missing_cpu_adam(view, with_states=pointer == masters and view.on(states))
        if missing is not None:
            what, hint = missing
            yield Finding(
                pointer=pointer,
                message=f"{pointer.rsplit('/', 1)[1]} needs {what}",
                hint=hint,
                deepspeed="raises AssertionError",
            )


def _missing_cpu_adam(view: RunView, *, with_states: bool) -> tuple[str, str] | None:
    """Return what master weights in 16 bits lack of an offloaded CPU Adam, and the remedy; None if they lack nothing.

    `with_states`: the optimizer state is in 16 bits, too, and may stay on the accelerator.
    """
    if not offloads(view, "offload_optimizer"):
        remedy = f'set offload_optimizer.device to "cpu" and optimizer.type to "{DEFAULT.name}", or remove it'
        return None if with_states else ("offload_optimizer and DeepSpeed's CPU Adam", remedy)
    advice = cpu_adam_advice(view)
    if advice is None:
        return None
    return "DeepSpeed's CPU Adam with offload_optimizer", advice if with_states else f"{advice}, or remove it"


@rule("DS405", "param-dtype-conflict", Severity.ERROR, claim="engine")
def param_dtype_conflict(view: RunView) -> Iterator[Finding]:
    """data_types.param_dtype differs from the precision that fp16 or bf16 sets.

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}
    """
    wanted = _kind(view.get("/data_types/param_dtype"))
    undecided = AUTO in (view.get("/bf16/enabled"), view.get("/fp16/enabled"))
    if wanted is not None and wanted != view.precision and not undecided:
        yield Finding(
            pointer="/data_types/param_dtype",
            message=f"param_dtype is {wanted}, but the model's precision is {view.precision}",
            hint=f"write {view.precision}, or remove it",
            deepspeed="raises AssertionError when the engine starts",
            on_value=True,
        )


@rule("DS406", "accumulation-in-another-type", Severity.ERROR, claim="engine")
def accumulation_in_another_type(view: RunView) -> Iterator[Finding]:
    """grad_accum_dtype differs from the model's dtype, without ZeRO; or it is int8.

    Only ZeRO has a buffer of another dtype to accumulate gradients in. int8 is a dtype that DeepSpeed knows, but
    gradients cannot be added up in it.

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
           "zero_optimization": {"stage": 1}}
    """
    wanted = _kind(view.get("/data_types/grad_accum_dtype"))
    undecided = AUTO in (view.get("/bf16/enabled"), view.get("/fp16/enabled"))
    if wanted == "int8":
        yield Finding(
            pointer="/data_types/grad_accum_dtype",
            message="gradients cannot be accumulated in int8",
            hint="write fp32, or remove it",
            deepspeed="raises NotImplementedError when the engine starts, or RuntimeError at the first step",
            on_value=True,
        )
    elif wanted is not None and wanted != view.precision and view.zero_stage == 0 and not undecided:
        yield Finding(
            pointer="/data_types/grad_accum_dtype",
            message=f"gradients in {wanted} for a model in {view.precision} need ZeRO",
            hint="set zero_optimization.stage to 1, or remove it",
            deepspeed="raises NotImplementedError when the engine starts",
            on_value=True,
        )


@rule("DS407", "fp16-without-zero", Severity.WARNING, claim="elsewhere")
def fp16_without_zero(view: RunView) -> Iterator[Finding]:
    """fp16 at ZeRO stage 0, which the harness runs at stage 1.

    DeepSpeed's optimizer for fp16 at stage 0 clips by a norm that depends on the layout. Stage 1 gives the results of
    one process, with less memory, so the harness uses it instead. It flattens and partitions the parameters. So an
    optimizer that needs whole tensors, such as Lamb, is refused unless zero_allow_untested_optimizer is true.

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}
    """
    if view.target != "harness" or view.precision != "fp16" or view.zero_stage != 0:
        return
    tested = is_tested_with_zero(view)
    yield Finding(
        pointer="/fp16/enabled",
        message="fp16 at ZeRO stage 0: "
        + ("the harness uses stage 1 instead" if tested else f"ZeRO is not tested with {view.get('/optimizer/type')}"),
        hint="set zero_optimization.stage to 1" + ("" if tested else " and zero_allow_untested_optimizer to true"),
        severity=None if tested else Severity.ERROR,
        deepspeed="clips by a norm that depends on the layout",
    )


@rule("DS408", "module-that-cannot-be-imported", Severity.ERROR, claim="engine")
def module_that_cannot_be_imported(view: RunView) -> Iterator[Finding]:
    """torch_autocast names a class that DeepSpeed cannot import.

    DeepSpeed imports each entry of `lower_precision_safe_modules` as PACKAGE.CLASS. Names of torch.nn are compared with
    those that torch has; other packages may be your own, and are not looked at.

    Wrong: {"train_batch_size": 8, "torch_autocast": {"enabled": true, "lower_precision_safe_modules": ["Linear"]}}
    Right: {"train_batch_size": 8, "torch_autocast": {"enabled": true,
           "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    """
    names = view.get(_MODULES)
    if not view.get("/torch_autocast/enabled") or not isinstance(names, list):
        return
    for index, name in enumerate(names):
        package, dot, class_name = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        is_qualified = bool(dot and class_name)
        if is_qualified and (package != "torch.nn" or class_name in torch_modules()):
            continue
        close = nearest(class_name or str(name), torch_modules())
        yield Finding(
            pointer=f"{_MODULES}/{index}",
            message=f"torch.nn has no {class_name}"
            if is_qualified
            else f"{show(name)} is not a class with its package",
            hint=f"write torch.nn.{close}" if close else "write PACKAGE.CLASS, such as torch.nn.Linear",
            deepspeed="raises ValueError when the engine starts",
            on_value=True,
        )


@rule("DS409", "auto-cast-without-fp16", Severity.ERROR, claim="elsewhere", target="deepspeed")
def auto_cast_without_fp16(view: RunView) -> Iterator[Finding]:
    """fp16.auto_cast is on, but fp16 is off: DeepSpeed still casts the model's inputs to fp16.

    The model then multiplies them with weights of another dtype. The harness casts inputs itself; with it this is not
    reported.

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": false, "auto_cast": true}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": false}}
    """
    if view.target != "harness" and view.on("/fp16/auto_cast") and view.precision != "fp16":
        yield Finding(
            pointer="/fp16/auto_cast",
            message=f"fp16.auto_cast casts inputs to fp16, but the model is in {view.precision}",
            hint="remove it, or enable fp16" if view.precision == "fp32" else "remove it",
            deepspeed="fails in the first forward pass",
        )


@rule("DS410", "fp8-without-bf16", Severity.ERROR, claim="elsewhere", arguments={"fp8": "rowwise"})
def fp8_without_bf16(view: RunView) -> Iterator[Finding]:
    """--fp8 needs a run in bf16; `rowwise` also needs an NVIDIA GPU of compute capability 8.9 or more.

    With `ds-harness check --fp8 rowwise`, and in a run. The linear layers of decoder layers then compute in fp8, if
    their widths are multiples of 16. Head, embeddings, norms, attention, fused experts, routers and adapters stay in
    bf16. Of NVIDIA's GPUs, Ada (L4, L40S, RTX 4090), Hopper (H100, H200), Blackwell (B200) and later ones have fp8;
    A100 and older ones do not, nor do AMD's and CPUs here: there `emulate` computes the same numbers, slowly.

    Wrong: {"train_batch_size": 8}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}}
    """
    how = "no" if view.arguments is None else view.arguments.fp8
    if how != "no" and view.precision != "bf16":
        of_file = next((name for name in ("fp16", view.bf16_section) if view.has(f"/{name}/enabled")), "bf16")
        yield Finding(
            pointer=f"/{of_file}/enabled",
            message=f"--fp8 {how} needs bf16, but this run computes in {view.precision}",
            hint="set bf16.enabled to true",
            deepspeed="knows no fp8",
            on_value=True,
        )
