"""Rules about the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.rules.rule import Finding, rule
from harness.config.rules.view import RunView
from harness.config.schema import signatures
from harness.config.schema.suggest import nearest
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO, whole
from harness.wording import one_of

TYPE, PARAMS = "/scheduler/type", "/scheduler/params"


def _known(view: RunView) -> tuple[str | None, dict[str, list[str]] | None]:
    """Return the schedule's name and arguments; no arguments if it is unknown."""
    name = view.get(TYPE)
    if not isinstance(name, str):
        return None, None
    return name, signatures()["deepspeed_schedulers"].get(name) or signatures()["torch_schedulers"].get(name)


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
    close = nearest(name, (*own, *signatures()["torch_schedulers"]))
    yield Finding(
        pointer=TYPE,
        message=f"unknown scheduler {name}",
        hint=f"did you mean {close}?" if close else f"use {one_of(own)}, or a class of torch.optim.lr_scheduler",
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
        if param in arguments["params"]:
            continue
        owners = [other for other, has in signatures()["deepspeed_schedulers"].items() if param in has["params"]]
        close = nearest(param, arguments["params"])
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

    WarmupDecayLR and WarmupCosineLR need total_num_steps; `"auto"` takes it from the arguments.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}}
    """
    name, arguments = _known(view)
    if arguments is None:
        return
    given = {param for param, value in view.section(PARAMS).items() if value != AUTO or param == "total_num_steps"}
    missing = [param for param in arguments["required"] if param not in given]
    if view.get(PARAMS) is None and not missing:
        missing = ["params"]
    if missing:
        yield Finding(
            pointer=PARAMS if view.has(PARAMS) else TYPE,
            message=f"{name} needs {one_of(missing).replace(' or ', ' and ')}",
            hint='add "params": {}' if missing == ["params"] else f"add {missing[0]} to scheduler.params",
            deepspeed="raises TypeError when the engine builds the schedule",
        )


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
