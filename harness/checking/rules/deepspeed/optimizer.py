"""Rules about the optimizer: its name, its arguments, and what ZeRO and fp16 ask of it."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules import edits
from harness.checking.rules.deepspeed.offload import offloads, uses_zenflow
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.checking.schema.coercion import as_float
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO
from harness.optimizers import DEFAULT, OPTIMIZERS, OptimizerClass, OptimizerType, find
from harness.spelling import nearest
from harness.wording import one_of

TYPE, PARAMS = "/optimizer/type", "/optimizer/params"
_OF_ELEMENTS = [
    each.name
    for each in OPTIMIZERS.values()
    if each.source == "deepspeed" and each.elementwise and each.tested_with_zero
]
"""DeepSpeed's optimizers that update each weight by itself."""


def stated(view: RunView) -> str | None:
    """Return the optimizer's name as the file has it; None if it names none."""
    name = view.get(TYPE)
    if not isinstance(name, str) or (name == AUTO and view.target == "harness"):
        return None
    return None if not name and view.target != "harness" else name  # "" is as without an optimizer


def kind(view: RunView) -> OptimizerType | None:
    """Return the optimizer that the file names; None without one, and for a name that is not known."""
    found = find(stated(view) or "")
    return None if found is not None and found.source == "harness" and view.target != "harness" else found


def about_type(*, message: str, hint: str, deepspeed: str) -> Finding:
    """Return a finding at the optimizer's name."""
    return Finding(pointer=TYPE, message=message, hint=hint, deepspeed=deepspeed, on_value=True)


def _class(view: RunView, optimizer: OptimizerType) -> OptimizerClass:
    """Return the class that the engine builds for an optimizer."""
    by_torch = view.on(f"{PARAMS}/torch_adam")
    offloaded = offloads(view, "offload_optimizer")
    return optimizer.class_of(view.section(PARAMS), by_torch=by_torch, offloaded=offloaded)


def has_momentum(view: RunView) -> bool:
    """Return whether the optimizer has a momentum or betas that a schedule can set; True if it is not known.

    An optimizer that sets its groups keeps its momentum there, and schedules look for it among the defaults.
    """
    optimizer = kind(view)
    options = None if optimizer is None else _class(view, optimizer).options
    if optimizer is None or options is None:
        return True
    return not optimizer.sets_groups and bool({"momentum", "betas"} & set(options))


def cpu_adam_advice(view: RunView) -> str | None:
    """Return how to make DeepSpeedCPUAdam the offloaded optimizer; None if it is, or if the program may bring it.

    With ZenFlow DeepSpeed builds a subclass, and features that ask for DeepSpeedCPUAdam refuse that.
    """
    optimizer = kind(view)
    name = stated(view)
    if not view.has(TYPE) and view.target != "harness":
        return None
    if not view.has(TYPE) or (name is not None and (optimizer is None or optimizer.family != DEFAULT.family)):
        return f'set optimizer.type to "{DEFAULT.name}"'
    if view.on(f"{PARAMS}/torch_adam"):
        return "remove torch_adam"
    return "remove zenflow" if uses_zenflow(view) and view.target != "harness" else None


def _allowed(view: RunView, optimizer: OptimizerType) -> set[str] | None:
    """Return the parameters that an optimizer may be given; None if they are not known."""
    options = _class(view, optimizer).options
    return None if options is None else {*options, *optimizer.engine_options}


def instead(view: RunView, *names: str) -> str:
    """Return the advice to use one of DeepSpeed's optimizers: those that take the parameters that are given."""
    given = set(view.section(PARAMS))
    fitting = [name for name in names if given <= (_allowed(view, OPTIMIZERS[name]) or set())]
    return f"use {one_of(fitting)}" if fitting else f"use {one_of(list(names))} with its own parameters"


def _unknown(view: RunView) -> str | None:
    """Return the optimizer's name if nobody knows it, else None."""
    return stated(view) if kind(view) is None else None


def is_tested_with_zero(view: RunView) -> bool:
    """Return whether DeepSpeed runs ZeRO with the optimizer; so it does with all if the file allows untested ones."""
    optimizer = kind(view)
    return optimizer is None or optimizer.tested_with_zero or bool(view.get("/zero_allow_untested_optimizer"))


def _meant(view: RunView, optimizer: OptimizerType) -> str:
    """Return the advice to use another name, and other parameters if those that are given are not of its class."""
    allowed = _allowed(view, optimizer)
    fits = allowed is None or allowed >= set(view.section(PARAMS))
    return f"did you mean {optimizer.name}?" if fits else f"use {optimizer.name} with its own parameters"


def _successor(name: str) -> OptimizerType | None:
    """Return the optimizer that replaces one that DeepSpeed has removed."""
    return next((each for each in OPTIMIZERS.values() if name.lower().replace("_", "") in each.succeeds), None)


@rule("DS801", "unknown-optimizer", Severity.ERROR, claim="engine")
def unknown_optimizer(view: RunView) -> Iterator[Finding]:
    """The optimizer is neither DeepSpeed's own nor a class of torch.optim.

    DeepSpeed ignores the case of its own names. Names from torch.optim must be written as in torch.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamWW"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    """
    name = _unknown(view)
    if name is not None and _successor(name) is None:
        known = [each.name for each in OPTIMIZERS.values() if each.source != "harness" or view.target == "harness"]
        close = nearest(name, known)
        others = f"{instead(view, *_OF_ELEMENTS)}, or a class of torch.optim"
        yield about_type(
            message=f"unknown optimizer {name}",
            hint=_meant(view, OPTIMIZERS[close]) if close else others,
            deepspeed="raises AssertionError when the engine starts",
        )


@rule("DS802", "removed-optimizer", Severity.ERROR, claim="engine")
def removed_optimizer(view: RunView) -> Iterator[Finding]:
    """OneBitAdam, OneBitLamb and ZeroOneAdam are no longer part of DeepSpeed.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    """
    name = _unknown(view)
    successor = _successor(name) if name is not None else None
    if successor is not None:
        yield about_type(
            message=f"{name} is an optimizer that DeepSpeed has removed",
            hint=instead(view, successor.name),
            deepspeed="raises AssertionError when the engine starts",
        )


@rule("DS803", "unknown-optimizer-parameter", Severity.ERROR, claim="engine")
def unknown_optimizer_parameter(view: RunView) -> Iterator[Finding]:
    """The optimizer's class has no argument of this name.

    The config decides which class is built: Adam is FusedAdam, with an offloaded optimizer DeepSpeedCPUAdam, and with
    `"torch_adam": true` torch's own. These classes take different arguments. Muon ignores an argument that it does not
    know without a word; the harness refuses it.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    """
    optimizer = kind(view)
    allowed = None if optimizer is None else _allowed(view, optimizer)
    if optimizer is None or allowed is None:
        return
    built = _class(view, optimizer)
    dropped = optimizer.sets_groups  # DeepSpeed takes the options of each group that it knows
    shown = optimizer.name if dropped else built.name
    for param in view.section(PARAMS):
        twice = param in built.set_by_engine
        if (param in allowed and not twice) or param == "max_grad_norm":
            continue
        close = nearest(param, allowed)
        yield Finding(
            pointer=f"{PARAMS}/{param}",
            message=f"{shown} has no parameter {param}" if not twice else f"the engine sets {param} itself",
            hint=f"did you mean {close}?" if close and close not in view.section(PARAMS) else "remove it",
            severity=Severity.WARNING if dropped and view.target != "harness" else None,
            deepspeed="silently ignores it" if dropped else "raises TypeError when the engine builds the optimizer",
        )


@rule("DS804", "max-grad-norm-in-optimizer", Severity.ERROR, claim="engine")
def max_grad_norm_in_optimizer(view: RunView) -> Iterator[Finding]:
    """The clipping norm is set among the optimizer's parameters.

    The engine clips gradients, not the optimizer. Its key is gradient_clipping, at the top level.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0}
    """
    pointer = f"{PARAMS}/max_grad_norm"
    if view.has(pointer):
        clash = view.file_has("/gradient_clipping")
        yield Finding(
            pointer=pointer,
            message="max_grad_norm is not a parameter of the optimizer",
            hint="remove it; gradient_clipping is set as well" if clash else "move it to gradient_clipping",
            deepspeed="raises ValueError when the engine builds the optimizer",
            edits=edits.move(view.document, pointer, "/gradient_clipping"),
        )


@rule("DS805", "untested-optimizer", Severity.ERROR, claim="engine")
def untested_optimizer(view: RunView) -> Iterator[Finding]:
    """ZeRO is on with an optimizer that DeepSpeed has not tested with ZeRO.

    ZeRO flattens the parameters. That is right for optimizers that update each element by itself (Adam, Adagrad, Lion),
    and wrong for those that need whole tensors (Lamb, Adafactor). So DeepSpeed requires zero_allow_untested_optimizer
    for every optimizer that it has not tested.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD",
           "params": {"lr": 0.1}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD",
           "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": true}
    """
    if is_tested_with_zero(view) or view.zero_stage in (0, None):
        return
    yield about_type(
        message=f"DeepSpeed has not tested ZeRO with {view.get(TYPE)}",
        hint=f"{instead(view, *_OF_ELEMENTS)}, or set zero_allow_untested_optimizer to true",
        deepspeed="raises AssertionError when the engine starts",
    )


@rule("DS806", "lamb-with-fixed-loss-scale", Severity.ERROR, claim="engine")
def lamb_with_fixed_loss_scale(view: RunView) -> Iterator[Finding]:
    """Lamb needs an adaptive loss scale even if fp16 is off, but fp16.loss_scale is fixed.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Lamb"}, "fp16": {"loss_scale": 128}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Lamb"}, "fp16": {"loss_scale": 0}}
    """
    scale = view.get("/fp16/loss_scale")
    if kind(view) is OPTIMIZERS["Lamb"] and scale != AUTO and as_float(scale) not in (None, 0.0):
        yield Finding(
            pointer="/fp16/loss_scale",
            message=f"Lamb needs an adaptive loss scale, but fp16.loss_scale is {scale}",
            hint="set fp16.loss_scale to 0",
            deepspeed="raises AssertionError when the engine starts",
            on_value=True,
        )


@rule("DS807", "offload-without-cpu-optimizer", Severity.WARNING, claim="runs")
def offload_without_cpu_optimizer(view: RunView) -> Iterator[Finding]:
    """The optimizer is offloaded, but DeepSpeed has no CPU version of it.

    DeepSpeed has CPU versions of Adam, Adagrad and Lion. Any other optimizer runs its step in PyTorch on the CPU, and
    every rank waits for it.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"torch_adam": true}},
           "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2,
           "offload_optimizer": {"device": "cpu"}}}
    """
    optimizer = kind(view)
    if optimizer is None or not offloads(view, "offload_optimizer") or not view.zero_stage:
        return
    by_torch = optimizer.torch is not None and view.on(f"{PARAMS}/torch_adam")
    if by_torch or not optimizer.tested_with_zero:
        shown = _class(view, optimizer).path if by_torch else optimizer.name
        yield Finding(
            pointer=f"{PARAMS}/torch_adam" if by_torch else TYPE,
            message=f"the offloaded step of {shown} runs in PyTorch on the CPU",
            hint="remove torch_adam" if by_torch else instead(view, *_OF_ELEMENTS),
            deepspeed="runs it without its vectorised CPU step",
        )


@rule("DS815", "amsgrad-that-deepspeed-lacks", Severity.ERROR, claim="engine", target="deepspeed")
def amsgrad_that_deepspeed_lacks(view: RunView) -> Iterator[Finding]:
    """amsgrad is on, but DeepSpeed's own Adam and Lamb do not have it.

    Their constructors accept the argument only to refuse it. torch's Adam has it, and the harness uses torch's unless
    the optimizer state is offloaded.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "amsgrad": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "amsgrad": true,
           "torch_adam": true}}}
    """
    optimizer = kind(view)
    if optimizer is None or not view.truthy(f"{PARAMS}/amsgrad"):
        return
    by_torch = view.target == "harness" and optimizer.torch and not offloads(view, "offload_optimizer")
    built = _class(view, optimizer)
    if "amsgrad" in built.refused and not by_torch:
        yield Finding(
            pointer=f"{PARAMS}/amsgrad",
            message=f"{built.name} does not have amsgrad",
            hint="remove it" + (", or set torch_adam to true" if optimizer.torch else ""),
            deepspeed="raises RuntimeError when the engine builds the optimizer",
        )


@rule("DS819", "parameters-that-exclude-each-other", Severity.ERROR, claim="engine")
def parameters_that_exclude_each_other(view: RunView) -> Iterator[Finding]:
    """Two parameters of an optimizer of torch exclude each other, or one cannot work in DeepSpeed's step.

    Nesterov momentum needs a momentum and no dampening; `fused` and `foreach` name two implementations. A
    `differentiable` step changes the weights where autograd forbids it.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true,
           "momentum": 0.9}}}
    """
    optimizer = kind(view)
    params = view.section(PARAMS)
    options = None if optimizer is None else _class(view, optimizer).options
    if optimizer is None or not _class(view, optimizer).path.startswith("torch."):
        return
    found = []
    if view.truthy(f"{PARAMS}/nesterov") and "nesterov" in (options or ()):
        if not params.get("momentum"):
            remedy = "" if params.get("dampening") else "set momentum to 0.9, or "
            found.append(("nesterov", "nesterov needs a momentum above 0", f"{remedy}remove nesterov"))
        elif params.get("dampening"):
            found.append(("dampening", "nesterov excludes dampening", "remove dampening"))
    if view.truthy(f"{PARAMS}/fused") and view.truthy(f"{PARAMS}/foreach"):
        found.append(("foreach", "fused and foreach exclude each other", "remove foreach"))
    if (asked := params.get("differentiable", False)) is not False and asked != AUTO:  # torch takes nothing but false
        found.append(("differentiable", "DeepSpeed cannot take a differentiable step", "remove differentiable"))
    for param, message, hint in found:
        yield Finding(
            pointer=f"{PARAMS}/{param}",
            message=message,
            hint=hint,
            deepspeed="fails when the engine builds the optimizer, or at the first step",
        )


@rule("DS820", "partial-offload-without-cpu-adam", Severity.ERROR, claim="elsewhere", target="deepspeed")
def partial_offload_without_cpu_adam(view: RunView) -> Iterator[Finding]:
    """offload_optimizer.ratio divides the optimizer state between devices, which only DeepSpeed's CPU Adam can.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"torch_adam": true}},
           "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {}},
           "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    """
    pointer = "/zero_optimization/offload_optimizer/ratio"
    ratio = as_float(view.get(pointer))
    advice = cpu_adam_advice(view)
    partial = ratio is not None and ratio < 1 and view.zero_stage == 3 and offloads(view, "offload_optimizer")
    if partial and view.target != "harness" and advice is not None:
        yield Finding(
            pointer=pointer,
            message=f"offload_optimizer.ratio {ratio} needs DeepSpeed's CPU Adam",
            hint=f"{advice}, or remove ratio",
            deepspeed="raises AssertionError when the engine starts",
            on_value=True,
        )


@rule("DS821", "optimizer-of-another-package", Severity.INFO, claim="engine")
def optimizer_of_another_package(view: RunView) -> Iterator[Finding]:
    """The optimizer comes from the package mup, which DeepSpeed imports and does not install.

    Without it DeepSpeed logs a line, and then fails on a variable that it has not set.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "MuSGD", "params": {"lr": 0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    """
    optimizer = kind(view)
    if optimizer is not None and optimizer.package and optimizer.source == "deepspeed":
        yield about_type(
            message=f"{view.get(TYPE)} needs the package {optimizer.package}",
            hint=f"pip install {optimizer.package}, or {instead(view, DEFAULT.name)}",
            deepspeed=f"raises UnboundLocalError when the engine builds it, unless {optimizer.package} is installed",
        )
