"""Rules that compare a config with the arguments of a run, where there is a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.arguments import AutoValues
from harness.config.values.batch import ARGUMENTS
from harness.config.values.pointers import AUTO, name_of
from harness.optimizers import FLAGS, find

# DeepSpeed's schedules -> HuggingFace's names for them.
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
BETAS = "/optimizer/params/betas"


@rule("DS951", "argument-in-conflict", Severity.ERROR, claim="elsewhere", arguments={"max_grad_norm": 0.5})
def argument_in_conflict(view: RunView) -> Iterator[Finding]:
    """The file and an argument of the run give different values.

    Neither wins: the run is refused, and the message names both. `"auto"` in the file takes the argument.
    The layout (`--pipeline_parallel_size`, `--tensor_parallel_size`, `--expert_parallel_size`,
    `--context_parallel_size`) is the exception: there the argument overrides the file.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto"}
    """
    values = view.arguments
    if values is None:
        return
    stated = [(pointer, name, getattr(values, name)) for pointer, name in ARGUMENTS.items()]
    stated += [(f"/{view.bf16_section}/enabled", "bf16", values.bf16), ("/fp16/enabled", "fp16", values.fp16)]
    for pointer, name, wanted in (*stated, *values.by_pointer):
        in_file = view.in_file(pointer)
        if pointer == "/scheduler/params/warmup_num_steps":
            in_file = 1 if in_file == 0 else in_file  # the harness writes 1 for 0
        if name in values.given and pointer != BETAS and in_file not in (None, AUTO, wanted):
            yield _conflict(pointer, name, wanted, in_file)
    yield from _other_betas(view.in_file(BETAS), values)
    kind = view.in_file("/optimizer/type")
    if "optim" in values.given and isinstance(kind, str) and kind != AUTO and not _means(values.optim, kind):
        yield _conflict("/optimizer/type", "optim", values.optim, kind)
    kind = view.get("/scheduler/type")
    if not isinstance(kind, str) or kind == AUTO:
        return
    instead = "give one of them: remove the flag, or remove scheduler from the file"
    if "lr_scheduler_type" in values.given and SCHEDULERS.get(kind) != values.lr_scheduler_type:
        yield replace(_conflict("/scheduler/type", "lr_scheduler_type", values.lr_scheduler_type, kind), hint=instead)
    if values.lr_scheduler_kwargs:
        yield replace(
            _conflict("/scheduler/type", "lr_scheduler_kwargs", values.lr_scheduler_kwargs, kind), hint=instead
        )


def _other_betas(in_file: object, values: AutoValues) -> Iterator[Finding]:
    """Yield a finding for each beta that was given and differs from the file's."""
    names = ("adam_beta1", "adam_beta2")
    for name, beta in zip(names, in_file, strict=False) if isinstance(in_file, list) else ():
        wanted = getattr(values, name)
        if name in values.given and beta != wanted:
            yield _conflict(BETAS, name, wanted, in_file)


def _means(optim: str, name: str) -> bool:
    """Return whether a value of --optim and a name in the config mean the same optimizer, or two of one family.

    Those of a package of their own have other states in memory than their family.
    """
    wanted = FLAGS[optim]
    named = find(name)
    if named is None or named.package or wanted.package:
        return name.lower() == wanted.name.lower()
    return named.shares_state_with(wanted)


def _conflict(pointer: str, name: str, wanted: object, in_file: object) -> Finding:
    return Finding(
        pointer=pointer,
        message=f"--{name} is {wanted} and {name_of(pointer)} is {in_file}",
        hint='give one of them, or write "auto" in the file',
    )
