"""A rule about settings that have no effect because another key is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.checking.schema import find
from harness.checking.schema.coercion import as_float
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import AUTO, name_of

ZERO = "/zero_optimization"
_ON = {"device": '"cpu"', "autotp_size": "2 or more"}
"""Switches that are not true when they are on -> an example of a value."""
_BY_ARGUMENT = ("/fp16", "/bf16", "/bfloat16", "/tensorboard", "/csv_monitor", "/wandb", "/comet")
"""Sections that an argument of a run of the harness turns on, such as --bf16 or --report_to."""


def is_other(value: object, default: object) -> bool:
    """Return whether a value asks for something else than its key's default."""
    if value in (None, AUTO, [], {}):
        return False
    return value is not bool(default) if isinstance(value, bool) else value != default


@dataclass(frozen=True)
class Needs:
    """Keys of a section that act only under a condition, and how to meet it."""

    section: str
    names: tuple[str, ...]
    holds: Callable[[RunView], bool]
    why: str
    hint: str


def _device(view: RunView, name: str) -> object:
    return view.as_read(f"{ZERO}/{name}/device")


def _on_nvme(view: RunView) -> bool:
    return "nvme" in (_device(view, "offload_optimizer"), _device(view, "offload_param"))


def _is_dynamic(view: RunView) -> bool:
    return not as_float(view.get("/fp16/loss_scale"))


NEEDS = (
    Needs(
        f"{ZERO}/offload_param",
        ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
        lambda view: _device(view, "offload_param") == "nvme",
        'offload_param.device is not "nvme"',
        "remove it",
    ),
    Needs(
        f"{ZERO}/offload_optimizer",
        ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
        lambda view: _device(view, "offload_optimizer") == "nvme",
        'offload_optimizer.device is not "nvme"',
        'remove it, or set offload_optimizer.device to "nvme"',
    ),
    Needs(
        f"{ZERO}/offload_optimizer",
        ("cpuadam_cores_perc",),
        lambda view: view.on(f"{ZERO}/offload_optimizer/super_offload"),
        "super_offload is off",
        "remove it, or set super_offload to true",
    ),
    Needs(
        "/aio",
        ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
        _on_nvme,
        "nothing is offloaded to NVMe",
        "remove the section",
    ),
    Needs(
        "/activation_checkpointing",
        ("number_checkpoints",),
        lambda view: view.on("/activation_checkpointing/contiguous_memory_optimization"),
        "contiguous_memory_optimization is off",
        "remove it, or set contiguous_memory_optimization to true",
    ),
    Needs(
        "/comms_logger",
        ("prof_ops",),
        lambda view: not view.on("/comms_logger/enabled") or view.as_read("/comms_logger/prof_all") is False,
        "prof_all is on, which is its default",
        "set prof_all to false",
    ),
    Needs(
        "/fp16",
        ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
        _is_dynamic,
        "loss_scale fixes the scale",
        "remove it, or set fp16.loss_scale to 0",
    ),
    Needs(
        "/bf16",
        ("check_grad_overflow",),
        lambda view: view.zero_stage != 3,
        "ZeRO-3 always checks",
        "remove it",
    ),
    Needs(
        "/pipeline",
        ("schedule", "chunks_per_stage"),
        lambda view: view.target != "harness" or view.pp_size > 1,
        "there is one stage",
        "set pipeline.stages to 2 or more, or remove it",
    ),
)


@rule("DS110", "setting-without-its-switch", Severity.WARNING, claim="runs")
def setting_without_its_switch(view: RunView) -> Iterator[Finding]:
    """A key has no effect because the key that it depends on is off.

    Examples are settings of the swap to NVMe if nothing is swapped, of a section that is not enabled, of a dynamic loss
    scale if the scale is fixed, and of a pipeline with one stage. DeepSpeed accepts them and does nothing. The switch
    is `enabled` in most sections; it is `device` of an offload section, `autotp_size` of tensor_parallel, `deepcompile`
    of compile, and `type` of optimizer and scheduler. A section whose switch is given and off is off on purpose, and is
    not reported.

    Wrong: {"train_batch_size": 8, "flops_profiler": {"profile_step": 5}}
    Right: {"train_batch_size": 8, "flops_profiler": {"enabled": true, "profile_step": 5}}
    """
    for needs in NEEDS:
        if needs.holds(view):
            continue
        for name in needs.names:
            if _asks(view, pointer := f"{needs.section}/{name}"):
                yield _finding(pointer, needs.why, needs.hint)
    yield from _without_switch(view)


def _without_switch(view: RunView) -> Iterator[Finding]:
    """Yield a finding for each section whose switch is absent although a setting in it asks for something."""
    for visit in view.visits:
        switches = visit.key.spec.get("x-switch") if visit.key is not None else None
        section = view.get(visit.pointer)
        by_argument = view.target == "harness" and visit.pointer in _BY_ARGUMENT
        if switches is None or not isinstance(section, dict) or by_argument or section.keys() & set(switches):
            continue
        asked = next((name for name in section if _acts_alone(view, f"{visit.pointer}/{name}")), None)
        if asked is not None:
            switch = switches[0] if view.target == "harness" else switches[-1]
            off = f"{name_of(visit.pointer)} is off"
            hint = f"set {name_of(visit.pointer)}.{switch} to {_ON.get(switch, 'true')}, or remove {asked}"
            if switch == "type":  # whose class takes parameters of its own
                hint = f"remove {asked}, or name the class in {name_of(visit.pointer)}.type"
            excluded = view.target == "harness" and visit.name == "compile" and view.zero_stage == 3
            yield _finding(f"{visit.pointer}/{asked}", off, "remove it" if excluded else hint)


def _acts_alone(view: RunView, pointer: str) -> bool:
    key = find(pointer)
    is_group = key is not None and key.is_section and key.unknown_keys != "free"
    return key is not None and not is_group and pointer != "/fp16/auto_cast" and _asks(view, pointer)


def _asks(view: RunView, pointer: str) -> bool:
    key = find(pointer)
    default: object = key.spec.get("default") if key is not None else None
    return view.has(pointer) and is_other(view.as_read(pointer), default)


def _finding(pointer: str, why: str, hint: str) -> Finding:
    return Finding(
        pointer=pointer,
        message=f"{name_of(pointer)} has no effect: {why}",
        hint=hint,
        deepspeed="ignores it",
    )
