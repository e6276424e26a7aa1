"""A rule about numbers that DeepSpeed accepts unchecked, but that make no sense for training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.syntax.values import show, unchecked_ranges
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import AUTO, name_of
from harness.optimizers import find
from harness.wording import one_of


@dataclass(frozen=True)
class Bounds:
    """The valid numbers: from `least` to `most`, each of which may be excluded.

    `count` is the length that a list must have; without it only names in `LISTS` may have a list. `whole`: no
    fractions.
    """

    least: float
    most: float = math.inf
    without_least: bool = False
    without_most: bool = False
    count: int | None = None
    whole: bool = False

    def hold(self, number: float) -> bool:
        """Return whether a number is possible; one that is not finite never is."""
        try:
            if not math.isfinite(number) or (self.whole and number != int(number)):
                return False
        except OverflowError:  # a whole number too large for a float
            return False
        above = number > self.least if self.without_least else number >= self.least
        return above and (number < self.most if self.without_most else number <= self.most)

    def __str__(self) -> str:
        low = f"{'above' if self.without_least else 'at least'} {self.least:g}" if self.least > -math.inf else ""
        high = f"{'below' if self.without_most else 'at most'} {self.most:g}" if self.most < math.inf else ""
        return ("whole and " if self.whole else "") + " and ".join(filter(None, (low, high)))


KINDS = {
    "not_negative": Bounds(0),
    "positive": Bounds(0, without_least=True),
    "count": Bounds(1, whole=True),
    "not_positive": Bounds(-math.inf, 0),
    "share": Bounds(0, 1),
    "positive_share": Bounds(0, 1, without_least=True),
    "decay": Bounds(0, 1, without_most=True),
    "two_decays": Bounds(0, 1, without_most=True, count=2),
    "two_not_negative": Bounds(0, count=2),
    "two_positive": Bounds(0, without_least=True, count=2),
    "step": Bounds(-1, whole=True),
    "depth": Bounds(-1),
    "exponent": Bounds(0, 126),  # a loss times 2 to the power of 127 overflows float32
}
_TABLE: JsonObject = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
OPTIMIZER, SCHEDULER, OTHERS, _WITHOUT_THE_HARNESS = (
    {name: KINDS[kind] for kind, names in _TABLE[part].items() for name in names}
    for part in ("optimizer", "scheduler", "others", "others_without_the_harness")
)
"""Bounds by name, for a parameter of any optimizer or scheduler class; by pointer, for a number in another section for
which DeepSpeed's parser has no bounds."""
LISTS: list[str] = _TABLE["lists"]
"""Parameters that may be a list of numbers: one for each parameter group, or the steps of a schedule."""
ONLY_LISTS: list[str] = _TABLE["only_lists"]
"""Those of them that may not be a number."""
OPTIONAL: list[str] = _TABLE["optional"]
"""Parameters that may be null, which is their default."""
SWITCHES: list[str] = _TABLE["switches"]
"""Parameters that are true or false; Python takes any text for true."""
WORDS: dict[str, list[str]] = _TABLE["words"]
"""Name of a parameter -> the words that it accepts."""
FUNCTIONS: list[str] = _TABLE["functions"]
"""Parameters that are Python functions."""


@rule("DS207", "impossible-value", Severity.ERROR, claim="runs")
def impossible_value(view: RunView) -> Iterator[Finding]:
    """A value makes no sense: a negative learning rate, a decay rate of 2, a schedule of -5 steps, a number as text.

    DeepSpeed checks hardly any value of the optimizer, of the schedule, and of the sections that it does not validate.
    Some wrong values make the loss grow or divide by zero without a message; others end the run when the engine is
    built.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": -0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    """
    optimizer = find(str(view.get("/optimizer/type")))
    special = {name: KINDS[kind] for name, kind in optimizer.ranges.items()} if optimizer is not None else {}
    for section, known in (("/optimizer", OPTIMIZER | special), ("/scheduler", SCHEDULER)):
        if view.target == "deepspeed" and not view.get(f"{section}/type"):
            continue  # nothing reads the parameters
        for name, value in view.section(f"{section}/params").items():
            pointer = f"{section}/params/{name}"
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
    others = OTHERS if view.target == "harness" else OTHERS | _WITHOUT_THE_HARNESS
    for pointer, bounds in others.items():
        yield from _outside(pointer, view.as_read(pointer), bounds)
    for visit, reading in unchecked_ranges(view):
        yield _finding(visit.pointer, f"is {show(visit.value)}", f"a value that is {reading.wanted}")


def _wanted(name: str, value: object, bounds: Bounds) -> str:
    """Return what is wanted instead of a value that is not a number, or not the list that is needed; else empty."""
    if value == AUTO or (value is None and name in OPTIONAL):
        return ""
    items = [value]
    if isinstance(value, list) and (bounds.count is not None or name in LISTS):
        items = value[1:] if name == "eps" and value[:1] == [None] else value  # the first of two may be null
    numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in items)
    needs_list = bounds.count is not None or name in ONLY_LISTS
    if numbers and (isinstance(value, list) or not needs_list):
        return ""
    if bounds.count is not None:
        return f"a list of {bounds.count} numbers"
    return "a list of numbers" if needs_list else "a number, without quotes"


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
