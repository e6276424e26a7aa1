"""Rules about the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.deepspeed.optimizer import has_momentum, kind, stated
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.syntax.ranges import FUNCTIONS, LISTS
from harness.checking.rules.view import RunView
from harness.checking.schema import Signature, signatures
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO, whole
from harness.spelling import nearest
from harness.wording import all_of, one_of

TYPE, PARAMS = "/scheduler/type", "/scheduler/params"
_PEAKS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr",
          "LRRangeTest": "lr_range_test_min_lr"}  # fmt: skip
"""DeepSpeed's schedules that set the learning rate themselves -> the parameter that says how high."""


def _known(view: RunView) -> tuple[str | None, Signature | None]:
    """Return the schedule's name and arguments; no arguments if it is unknown."""
    name = view.get(TYPE)
    if not isinstance(name, str):
        return None, None
    return name, signatures()["deepspeed_schedulers"].get(name) or signatures()["torch_schedulers"].get(name)


def _wrapper(view: RunView) -> str | None:
    """Return what wraps the optimizer in one of DeepSpeed's own, which torch's schedules refuse; None if nothing."""
    if view.zero_stage:
        return f"ZeRO stage {view.zero_stage}"
    return view.precision if view.precision != "fp32" and view.zero_stage == 0 else None


def _meant(view: RunView, name: str) -> str:
    """Return the advice to use another schedule, and its parameters if those that are given are not its own."""
    meant = signatures()["deepspeed_schedulers"].get(name) or signatures()["torch_schedulers"][name]
    given = view.section(PARAMS).keys()
    fits = view.has(PARAMS) and given <= set(meant.params) and given >= set(meant.required)
    return f"did you mean {name}?" if fits else f"use {name} with its own parameters"


@rule("DS811", "unknown-scheduler", Severity.ERROR, claim="engine")
def unknown_scheduler(view: RunView) -> Iterator[Finding]:
    """The schedule is neither DeepSpeed's own nor a class of torch.optim.lr_scheduler.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupDecay"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {}}}
    """
    name, arguments = _known(view)
    if name is None or arguments is not None:
        return
    own = list(signatures()["deepspeed_schedulers"])
    of_torch = () if _wrapper(view) else tuple(signatures()["torch_schedulers"])
    close = nearest(name, (*own, *of_torch))
    others = ", or a class of torch.optim.lr_scheduler" if of_torch else ""
    yield Finding(
        pointer=TYPE,
        message=f"unknown scheduler {name}",
        hint=_meant(view, close) if close else f"use {one_of(own)} with its own parameters{others}",
        deepspeed="raises AssertionError when the engine starts",
        on_value=True,
    )


@rule("DS812", "parameter-of-another-scheduler", Severity.ERROR, claim="engine")
def parameter_of_another_scheduler(view: RunView) -> Iterator[Finding]:
    """The schedule has no parameter of this name; often another schedule has.

    For example, WarmupCosineLR scales the optimizer's learning rate by ratios and has no warmup_max_lr.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_max_lr": 0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_min_ratio": 0.1}}}
    """
    name, arguments = _known(view)
    if arguments is None:
        return
    given = view.section(PARAMS)
    for param in given:
        if param in arguments.params:
            continue
        owners = [other for other, has in signatures()["deepspeed_schedulers"].items() if param in has.params]
        close = nearest(param, arguments.params)
        hint = f"did you mean {close}?" if close and close not in given and not owners else "remove it"
        yield Finding(
            pointer=f"{PARAMS}/{param}",
            message=f"{name} has no parameter {param}" + (f"; {one_of(owners)} has" if owners else ""),
            hint=hint,
            deepspeed="raises TypeError when the engine builds the schedule",
        )


@rule("DS813", "missing-scheduler-parameter", Severity.ERROR, claim="engine")
def missing_scheduler_parameter(view: RunView) -> Iterator[Finding]:
    """The schedule needs an argument that is not given, or `params` is missing altogether.

    WarmupDecayLR and WarmupCosineLR need total_num_steps; `"auto"` takes it from the arguments. OneCycleLR needs
    total_steps, or epochs and steps_per_epoch.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}}
    """
    name, arguments = _known(view)
    if arguments is None:
        return
    given = {param for param, value in view.section(PARAMS).items() if value != AUTO or param == "total_num_steps"}
    missing = [param for param in arguments.required if param not in given]
    if name == "OneCycleLR" and "total_steps" not in given and not {"epochs", "steps_per_epoch"} <= given:
        missing.append("total_steps")
    if view.get(PARAMS) is None and not missing:
        missing = ["params"]
    if missing:
        yield Finding(
            pointer=PARAMS if view.has(PARAMS) else TYPE,
            message=f"{name} needs {all_of(missing)}",
            hint=_remedy(missing),
            deepspeed="raises TypeError when the engine builds the schedule",
        )


def _remedy(missing: list[str]) -> str:
    if set(missing) & set(FUNCTIONS):  # no JSON holds one
        return f"use {one_of(list(signatures()['deepspeed_schedulers']))} with its own parameters"
    return 'add "params": {}' if missing == ["params"] else f"add {all_of(missing)} to scheduler.params"


@rule("DS814", "no-warmup-steps", Severity.ERROR, claim="engine")
def no_warmup_steps(view: RunView) -> Iterator[Finding]:
    """warmup_num_steps is not a whole number of at least 1.

    DeepSpeed divides by it. Older versions replaced 0 by 2; this one refuses it. A warm-up of 1 step has the effect of
    none, so the harness writes 1 where the file says 0, as the HuggingFace Trainer does for "auto".

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}}
    """
    name, _ = _known(view)
    steps = view.get(f"{PARAMS}/warmup_num_steps")
    if name not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR") or not view.has(f"{PARAMS}/warmup_num_steps"):
        return
    exact = whole(steps) if isinstance(steps, int) else None
    if steps != AUTO and (exact is None or exact < 1):
        yield Finding(
            pointer=f"{PARAMS}/warmup_num_steps",
            message=f"warmup_num_steps is {steps!r}",
            hint="write 1, which has the same effect" if steps == 0 else "use a whole number of at least 1",
            severity=Severity.WARNING if steps == 0 and view.target == "harness" else None,
            deepspeed="raises ValueError when the engine builds the schedule",
            on_value=True,
        )


@rule("DS816", "torch-schedule-of-a-wrapped-optimizer", Severity.ERROR, claim="engine")
def torch_schedule_of_a_wrapped_optimizer(view: RunView) -> Iterator[Finding]:
    """A schedule of torch is named, but DeepSpeed wraps the optimizer.

    torch's schedules take nothing but a torch.optim.Optimizer. DeepSpeed hands them the optimizer of ZeRO, bf16 or
    fp16, which is not one; its own schedules look inside it.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 1},
           "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 1},
           "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100}}}
    """
    name, arguments = _known(view)
    wrapper = _wrapper(view)
    if arguments is not None and name in signatures()["torch_schedulers"] and wrapper is not None:
        own = one_of(list(signatures()["deepspeed_schedulers"]))
        yield Finding(
            pointer=TYPE,
            message=f"{name} is a schedule of torch, which cannot set the rate of an optimizer that {wrapper} wraps",
            hint=f"remove scheduler, or use {own} with its own parameters",
            deepspeed="raises TypeError when the engine builds the schedule",
            on_value=True,
        )


@rule("DS817", "schedule-of-a-metric", Severity.WARNING, claim="runs")
def schedule_of_a_metric(view: RunView) -> Iterator[Finding]:
    """ReduceLROnPlateau waits for a metric to improve, but DeepSpeed hands it the batch size.

    The batch size never improves, so the learning rate falls after every `patience` steps whatever the loss does.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "ReduceLROnPlateau", "params": {}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100}}}
    """
    if view.get(TYPE) == "ReduceLROnPlateau":
        yield Finding(
            pointer=TYPE,
            message="ReduceLROnPlateau never sees the loss: the learning rate falls whatever that does",
            hint="use WarmupCosineLR or WarmupDecayLR with its own parameters",
            deepspeed="passes the global batch size where the schedule expects a metric",
            on_value=True,
        )


@rule("DS818", "two-learning-rates", Severity.WARNING, claim="runs")
def two_learning_rates(view: RunView) -> Iterator[Finding]:
    """The optimizer and the schedule name different learning rates.

    These schedules set the rate themselves, so that of the optimizer is never used. WarmupDecayLR and LRRangeTest use
    0.001 if they name none; WarmupLR then takes the optimizer's.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    """
    name, arguments = _known(view)
    peak = _PEAKS.get(name or "")
    rate = view.get("/optimizer/params/lr")
    if peak is None or arguments is None or view.get(PARAMS) is None:
        return
    is_stated = view.has(f"{PARAMS}/{peak}")
    used = view.get(f"{PARAMS}/{peak}") if is_stated else arguments.defaults.get(peak)
    if not _is_number(rate) or not _is_number(used) or rate == used:
        return
    yield Finding(
        pointer=f"{PARAMS}/{peak}" if is_stated else TYPE,
        message=f"optimizer.params.lr is {rate}, but {name} "
        + (f"sets the rate by {peak} {used}" if is_stated else f"uses {peak} {used}, its default"),
        hint=f"set scheduler.params.{peak} to {rate}, or remove optimizer.params.lr",
        deepspeed="never uses the optimizer's rate",
        on_value=True,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@rule("DS823", "rates-for-groups-that-are-not-there", Severity.ERROR, claim="engine", target="deepspeed")
def rates_for_groups_that_are_not_there(view: RunView) -> Iterator[Finding]:
    """A list holds a rate for each group of parameters, but DeepSpeed puts all parameters into one group.

    It does so for every optimizer that the file names, unless that has a rate for matrices and one for the rest. A
    program that brings its own optimizer may have several groups.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1]}}}
    """
    optimizer = kind(view)
    several = stated(view) is None or (optimizer is not None and optimizer.sets_groups)
    if view.target == "harness" or several or _known(view)[1] is None:
        return
    for name, value in view.section(PARAMS).items():
        if name in LISTS and name != "milestones" and isinstance(value, list) and len(value) != 1:
            yield Finding(
                pointer=f"{PARAMS}/{name}",
                message=f"{name} has {len(value)} items, but DeepSpeed makes one group of parameters",
                hint="use a number",
                deepspeed="raises ValueError when the engine builds the schedule",
                on_value=True,
            )


@rule("DS824", "momentum-that-is-not-there", Severity.ERROR, claim="engine")
def momentum_that_is_not_there(view: RunView) -> Iterator[Finding]:
    """A schedule cycles the momentum, as is its default, but the optimizer has neither a momentum nor betas.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Rprop", "params": {"lr": 0.1}},
           "scheduler": {"type": "CyclicLR", "params": {"base_lr": 0.01, "max_lr": 0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Rprop", "params": {"lr": 0.1}},
           "scheduler": {"type": "CyclicLR", "params": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": false}}}
    """
    cycles = view.get(TYPE) in ("CyclicLR", "OneCycleLR") and view.section(PARAMS).get("cycle_momentum", True)
    if cycles and not has_momentum(view):
        yield Finding(
            pointer=TYPE,
            message=f"{view.get(TYPE)} cycles the momentum, which {view.get('/optimizer/type')} does not have",
            hint="set scheduler.params.cycle_momentum to false",
            deepspeed="raises ValueError when the engine builds the schedule",
            on_value=True,
        )


@rule("DS822", "schedule-that-starts-in-the-middle", Severity.ERROR, claim="engine")
def schedule_that_starts_in_the_middle(view: RunView) -> Iterator[Finding]:
    """A schedule of torch starts after its first step, which needs initial rates that a new optimizer does not hold.

    A resumed run restores the schedule from its checkpoint by itself.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "StepLR", "params": {"step_size": 10, "last_epoch": 5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "StepLR", "params": {"step_size": 10}}}
    """
    name, _ = _known(view)
    start = whole(view.get(f"{PARAMS}/last_epoch"))
    if name in signatures()["torch_schedulers"] and start is not None and start > -1:
        yield Finding(
            pointer=f"{PARAMS}/last_epoch",
            message=f"last_epoch is {start}, but a new {name} starts at its first step",
            hint="remove it",
            deepspeed="raises KeyError when the engine builds the schedule",
            on_value=True,
        )
