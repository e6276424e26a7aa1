"""Rules about "auto": which program resolves it, and its meaning if none does."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.syntax.values import show
from harness.checking.rules.view import KeyOccurrence, RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.layout_keys import GRADIENT_BITS, TENSOR
from harness.config.values.pointers import AUTO, name_of

# what transformers' HfTrainerDeepSpeedConfig fills in; the harness fills the same
_FILLED = frozenset(
    {
        "/train_batch_size",
        "/train_micro_batch_size_per_gpu",
        "/gradient_accumulation_steps",
        "/gradient_clipping",
        "/fp16/enabled",
        "/bf16/enabled",
        "/optimizer/params/lr",
        "/optimizer/params/betas",
        "/optimizer/params/eps",
        "/optimizer/params/weight_decay",
        "/scheduler/params/warmup_min_lr",
        "/scheduler/params/warmup_max_lr",
        "/scheduler/params/warmup_num_steps",
        "/scheduler/params/total_num_steps",
        "/zero_optimization/reduce_bucket_size",
        "/zero_optimization/stage3_prefetch_bucket_size",
        "/zero_optimization/stage3_param_persistence_threshold",
    }
)
_HARNESS_FILLS = frozenset({"/pipeline/stages", "/pipeline/partition", TENSOR, "/bfloat16/enabled", GRADIENT_BITS})
_ITS_OWN = frozenset({"/data_types/keep_in_fp32_modules"})  # DeepSpeed itself knows "auto" here
_OF_CLASSES = ("/optimizer/params", "/scheduler/params")
_USED_AT_ONCE = frozenset({"/train_batch_size", "/train_micro_batch_size_per_gpu", "/gradient_accumulation_steps"})


def _autos(view: RunView) -> Iterator[KeyOccurrence]:
    """Yield every "auto" that no program replaces."""
    filled = {"harness": _FILLED | _HARNESS_FILLS, "hf": _FILLED, "deepspeed": frozenset[str]()}[view.target]
    for visit in view.visits:
        of_class = visit.parent in _OF_CLASSES
        if of_class and view.target == "deepspeed" and not view.get(f"{visit.parent.removesuffix('params')}type"):
            continue  # nothing reads the parameters
        known = visit.key is not None or of_class
        known = known and "expert_parallel" not in visit.pointer and "zenflow" not in visit.pointer
        if visit.value == AUTO and known and visit.pointer not in filled | _ITS_OWN:
            yield visit


@rule("DS303", "auto-that-nobody-resolves", Severity.ERROR, claim="refuses", target="deepspeed")
def auto_that_nobody_resolves(view: RunView) -> Iterator[Finding]:
    """ "auto" where nobody replaces it with a value.

    DeepSpeed itself gives "auto" no meaning; the harness and the HuggingFace Trainer replace it before
    DeepSpeed sees it, but only in the places that they know. In a section that DeepSpeed does not check, "auto" stays a
    string, and fails where a number is needed: a batch size raises a TypeError at once, an optimizer's argument when
    the optimizer is built, another key when it is first used.

    Wrong: {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    Right: {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    """
    for visit in _autos(view):
        if visit.section.is_pydantic or view.target == "harness":
            continue
        at_once = visit.pointer in _USED_AT_ONCE or visit.parent in _OF_CLASSES
        fatal = at_once or visit.pointer == "/gradient_clipping"
        reader = "DeepSpeed" if view.target == "deepspeed" else "the HuggingFace Trainer"
        yield Finding(
            pointer=visit.pointer,
            message=f'{name_of(visit.pointer)} is "auto", which {reader} does not replace here',
            hint="write a value, or remove the key",
            severity=None if fatal and view.target == "deepspeed" else Severity.WARNING,
            deepspeed='takes "auto" as a string, and fails when the value is used',
            on_value=True,
        )


@rule("DS304", "auto-that-means-the-default", Severity.INFO, claim="runs")
def auto_that_means_the_default(view: RunView) -> Iterator[Finding]:
    """ "auto" where neither the harness nor the HuggingFace Trainer has a value for it.

    In a section that DeepSpeed checks, DeepSpeed drops the key; elsewhere the harness does. The message gives the
    default, which then applies.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": "auto"}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}
    """
    for visit in _autos(view):
        dropped = visit.section.is_pydantic or view.target == "harness"
        if not dropped or visit.pointer == "/zero_optimization/stage" or visit.key is None:
            continue
        default = visit.key.spec.get("default")
        yield Finding(
            pointer=visit.pointer,
            message=f'{name_of(visit.pointer)} is "auto": DeepSpeed\'s default {show(default)} applies',
            hint="write the value, or remove the key",
            deepspeed="drops the key" if visit.section.is_pydantic else "never sees it: the harness leaves the key out",
            on_value=True,
        )


@rule("DS305", "auto-zero-stage", Severity.WARNING, claim="runs")
def auto_zero_stage(view: RunView) -> Iterator[Finding]:
    """The ZeRO stage is "auto", which means stage 0.

    DeepSpeed drops every "auto" in this section, so the default applies: nothing is partitioned.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    """
    if view.section("/zero_optimization").get("stage") == AUTO:
        yield Finding(
            pointer="/zero_optimization/stage",
            message='the ZeRO stage is "auto", which means stage 0',
            hint="write 1, 2 or 3",
            deepspeed="drops the key and runs stage 0",
            on_value=True,
        )
