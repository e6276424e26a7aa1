"""A rule about numbers that DeepSpeed accepts unchecked, but that make no sense in a training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from harness.config.diagnostic import Severity
from harness.config.rules.rule import Finding, rule
from harness.config.rules.syntax.values import show, unchecked_ranges
from harness.config.values.pointers import AUTO, name_of
from harness.config.view import RunView
from harness.wording import one_of


@dataclass(frozen=True)
class Bounds:
    """The possible numbers: from `least` to `most`, each of which may be excluded.

    `count` is the number of items of a list; without it only names in `LISTS` may have one. `whole`: no fractions.
    """

    least: float
    most: float = math.inf
    without_least: bool = False
    without_most: bool = False
    count: int | None = None
    whole: bool = False

    def hold(self, number: float) -> bool:
        """Whether a number is possible; one that is not finite never is."""
        try:
            if not math.isfinite(number) or (self.whole and number != int(number)):
                return False
        except OverflowError:  # a whole number that is no float
            return False
        above = number > self.least if self.without_least else number >= self.least
        return above and (number < self.most if self.without_most else number <= self.most)

    def __str__(self) -> str:
        low = f"{'above' if self.without_least else 'at least'} {self.least:g}"
        high = "" if self.most == math.inf else f" and {'below' if self.without_most else 'at most'} {self.most:g}"
        return ("whole and " if self.whole else "") + low + high


NOT_NEGATIVE, POSITIVE, COUNT = Bounds(0), Bounds(0, without_least=True), Bounds(1, whole=True)
SHARE, DECAY = Bounds(0, 1), Bounds(0, 1, without_most=True)
LAST_STEP = Bounds(-1, whole=True)

OPTIMIZER: Mapping[str, Bounds] = {
    **dict.fromkeys(
        ("lr", "muon_lr", "adam_lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value"), NOT_NEGATIVE
    ),
    **dict.fromkeys(("momentum_decay", "lambd", "t0", "tolerance_grad", "tolerance_change"), NOT_NEGATIVE),
    "betas": Bounds(0, 1, without_most=True, count=2),
    **dict.fromkeys(("momentum", "rho"), DECAY),
    **dict.fromkeys(("alpha", "dampening"), SHARE),
    **dict.fromkeys(("max_coeff", "min_coeff", "d"), POSITIVE),
    **dict.fromkeys(("etas", "step_sizes"), Bounds(0, without_least=True, count=2)),
    **dict.fromkeys(("ns_steps", "max_iter", "max_eval", "history_size"), COUNT),
}
"""Bounds by the name of an optimizer's parameter, in any class."""

SCHEDULER: Mapping[str, Bounds] = {
    **dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr", "cycle_min_lr", "cycle_max_lr"), NOT_NEGATIVE
    ),
    **dict.fromkeys(("lr_range_test_step_rate", "decay_lr_rate", "decay_mom_rate", "decay_step_size"), NOT_NEGATIVE),
    **dict.fromkeys(
        ("cycle_first_stair_count", "cycle_second_stair_count", "eta_min", "base_lr", "max_lr"), NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("gamma", "power", "patience", "threshold", "cooldown", "min_lr", "eps", "milestones"), NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("total_num_steps", "lr_range_test_step_size", "cycle_first_step_size", "T_max", "T_0", "T_mult"), COUNT
    ),
    **dict.fromkeys(("cycle_second_step_size", "step_size", "step_size_up", "step_size_down", "total_iters"), COUNT),
    **dict.fromkeys(("total_steps", "epochs", "steps_per_epoch"), COUNT),
    **dict.fromkeys(("warmup_min_ratio", "cos_min_ratio", "pct_start", "end_factor"), SHARE),
    **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "base_momentum", "max_momentum"), DECAY),
    **dict.fromkeys(("factor", "start_factor"), Bounds(0, 1, without_least=True)),
    **dict.fromkeys(("div_factor", "final_div_factor"), POSITIVE),
    **dict.fromkeys(("last_batch_iteration", "last_epoch"), LAST_STEP),
}
"""Bounds by the name of a scheduler's parameter, in any class."""

LISTS = frozenset(
    ("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr", "base_lr", "max_lr", "min_lr", "base_momentum")
) | {"max_momentum", "milestones", "eps"}
"""Numbers that may also be a list: one for each group of parameters, the steps of a schedule, Adafactor's two."""
OPTIONAL = frozenset(("total_steps", "epochs", "steps_per_epoch", "step_size_down", "max_eval"))
"""Numbers that may be null, which is their default."""
SWITCHES = frozenset(
    ("torch_adam", "adam_w_mode", "adamw_mode", "fp32_optimizer_states", "amsgrad", "bias_correction", "capturable")
) | {"centered", "decoupled_weight_decay", "differentiable", "eps_inside_sqrt", "foreach", "fused", "maximize"}
SWITCHES |= {"nesterov", "set_grad_none", "cycle_momentum", "three_phase", "lr_range_test_staircase", "per_head_muon"}
"""Parameters that are on or off; text is on, whatever it says."""
WORDS: Mapping[str, tuple[str, ...]] = {
    "warmup_type": ("log", "linear"),
    "anneal_strategy": ("cos", "linear"),
    "scale_mode": ("cycle", "iterations"),
    "threshold_mode": ("rel", "abs"),
    "mode": ("triangular", "triangular2", "exp_range", "min", "max"),
}
FUNCTIONS = ("lr_lambda", "scale_fn", "schedulers")
"""Parameters that only Python can give."""

OTHERS: Mapping[str, Bounds] = {
    "/gradient_predivide_factor": POSITIVE,
    "/steps_per_print": NOT_NEGATIVE,
    "/fp16/initial_scale_power": Bounds(0, 126),  # 2 to the power of 127 times a loss is no float32
    "/fp16/loss_scale_window": COUNT,
    "/fp16/hysteresis": COUNT,
    "/fp16/min_loss_scale": NOT_NEGATIVE,
    "/activation_checkpointing/number_checkpoints": COUNT,
    "/comet/samples_log_interval": COUNT,
    "/flops_profiler/recompute_fwd_factor": NOT_NEGATIVE,
    "/flops_profiler/profile_step": COUNT,
    "/flops_profiler/module_depth": Bounds(-1),
    "/flops_profiler/top_modules": COUNT,
}
"""Bounds by the pointer of a number in another section for which DeepSpeed's own reader has none."""


@rule("DS207", "impossible-value", Severity.ERROR, claim="runs")
def impossible_value(view: RunView) -> Iterator[Finding]:
    """A value cannot be meant: a negative learning rate, a decay rate of 2, a schedule of -5 steps, a number as text.

    DeepSpeed checks hardly any value of the optimizer, of the schedule and of its plain sections. Some of these
    make the loss grow or divide by zero without any message; others end the run when the engine is built.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": -0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    """
    for section, known in (("/optimizer/params", OPTIMIZER), ("/scheduler/params", SCHEDULER)):
        for name, value in view.section(section).items():
            pointer = f"{section}/{name}"
            if name in FUNCTIONS:
                yield _finding(pointer, "is a function, which no JSON can hold", "another schedule")
            elif name in known and (wanted := _wanted(name, value, known[name])):
                yield _finding(pointer, f"is {show(value)}", wanted)
            elif name in known:
                yield from _outside(pointer, value, known[name])
            elif name in WORDS and value not in (*WORDS[name], AUTO):
                yield _finding(pointer, f"is {show(value)}", one_of(WORDS[name]))
            elif name in SWITCHES and isinstance(value, str | list | dict) and value != AUTO:
                on = "on" if value else "off"
                told = _finding(pointer, f"is {show(value)}, which is {on} whatever it says", "true or false")
                yield replace(told, severity=Severity.WARNING)
    for pointer, bounds in OTHERS.items():
        yield from _outside(pointer, view.as_read(pointer), bounds)
    for visit, reading in unchecked_ranges(view):
        yield _finding(visit.pointer, f"is {show(visit.value)}", f"a value that is {reading.wanted}")


def _wanted(name: str, value: object, bounds: Bounds) -> str:
    """Return what is wanted instead of a value that is no number, or no list if one is needed; empty if it is right."""
    if value == AUTO or (value is None and name in OPTIONAL):
        return ""
    is_list = isinstance(value, list) and (bounds.count is not None or name in LISTS)
    items = value if isinstance(value, list) and is_list else [value]
    numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in items if item is not None)
    numbers = numbers and (items is value or None not in items)  # Adafactor's first eps may be null
    if numbers and (bounds.count is None or is_list):
        return ""
    return f"a list of {bounds.count} numbers" if bounds.count is not None else "a number, without quotes"


def _outside(pointer: str, value: object, bounds: Bounds) -> Iterator[Finding]:
    items = value if isinstance(value, list) else [value]
    numbers = [item for item in items if isinstance(item, int | float) and not isinstance(item, bool)]
    wrong = next((number for number in numbers if not bounds.hold(number)), None)
    several = isinstance(value, list) and bounds.count not in (None, len(items))
    if wrong is None and not several:
        return
    pair = f"a list of {bounds.count} numbers, each " if bounds.count is not None else "a number that is "
    shown = f"has {len(items)} items" if several else f"{'holds' if isinstance(value, list) else 'is'} {show(wrong)}"
    yield _finding(pointer, shown, f"{pair}{bounds}")


def _finding(pointer: str, shown: str, wanted: str) -> Finding:
    return Finding(
        pointer=pointer,
        message=f"{name_of(pointer)} {shown}",
        hint=f"use {wanted}",
        deepspeed="does not check it, or ends when the engine is built",
        on_value=True,
    )
