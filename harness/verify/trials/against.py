"""Compare the losses of two programs step by step, and find the first step at which rounding does not explain them.

Two correct programs that begin alike drift apart, because each step starts from weights that rounding has changed.
Measured on tiny models over 300 steps, after rounding errors were put into the weights once: in float32 1e-7 at first
and 3e-6 at the end, in bf16 3e-5 and 3e-3. The limit is several times that, plus half a unit of the last printed digit.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from harness.checkpoint.directories import METRICS, RUN
from harness.config.values.json_file import object_or_empty, regular_bytes
from harness.config.values.pointers import lookup
from harness.errors import UserError

STEPS = ("step", "global_step", "iteration", "iter", "steps", "iterations", "update", "train_step")
LOSSES = ("loss", "train_loss", "lm_loss", "training_loss", "loss_train", "train_lm_loss", "cross_entropy", "nll_loss")
"""Names that are tried first: in lower case, with `_` for any other characters between words."""
NOT_OF_TRAINING = frozenset(
    ("eval", "evaluation", "val", "valid", "validation", "test", "dev", "aux", "scale", "min", "max", "z", "router")
)
"""Words in the names of losses that are not the training loss."""
NUMBER = r"(?:[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|[-+]?inf(?:inity)?)"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
IN_A_LOG = re.compile(
    rf"\b(?:step|iteration|iter)\b[\s:=\[]*(\d+).*?\b(?:lm )?(?:train_)?loss\b[\s:=]*({NUMBER})", re.IGNORECASE
)
ALLOWED = {"fp32": (2e-6, 2e-7), "bf16": (5e-4, 5e-5), "fp16": (2e-4, 2e-5)}
"""Allowed relative difference at the first step, and its growth with each step, by precision."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of a program.

    Attributes:
        losses: by step.
        digits: half a unit of the last printed digit, by step.
    """

    losses: Mapping[int, float]
    digits: Mapping[int, float]


def read_curve(path: Path) -> Curve:
    """Read the losses of a metrics file. UserError if it has no steps with losses."""
    file = path / METRICS if path.is_dir() else path
    try:
        text = regular_bytes(file).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    losses, digits = {}, {}
    for step, loss in _entries(file, text):
        losses[step] = float(loss)
        digits[step] = _half_unit(loss)
    if not losses:
        raise UserError(
            f"{file}: there are no steps with a loss: give a log, or .jsonl, .json or .csv with step and loss"
        )
    return Curve(losses=losses, digits=digits)


def _entries(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield step and loss, the loss as text."""
    if file.suffix == ".csv":
        first = text.partition("\n")[0]
        yield from _of_rows(csv.DictReader(text.splitlines(), delimiter=max(",;\t", key=first.count)))
    elif file.suffix == ".json":
        content = _parsed(text)
        rows = content.get("log_history", content.get("history", [])) if isinstance(content, dict) else content
        yield from _of_rows(rows if isinstance(rows, list) else [])
    elif text.lstrip().startswith("{"):
        yield from _of_rows(_parsed(line) for line in text.splitlines())
    else:
        for line in COLOURS.sub("", text).splitlines():
            if found := IN_A_LOG.search(line):
                yield int(found[1]), found[2]


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_float=str)
    except (ValueError, RecursionError):
        return None


def _of_rows(rows: Iterable[object]) -> Iterator[tuple[int, str]]:
    for row in rows:
        said = dict(_flat(row))
        if "train_runtime" in said:  # HuggingFace's last row: the mean of the whole run
            continue
        step = next(filter(None, map(said.get, _names(said, STEPS, "step"))), "")
        loss = next(filter(None, map(said.get, _names(said, LOSSES, "loss"))), "")
        if re.fullmatch(r"\d+(\.0*)?", step) and re.fullmatch(NUMBER, loss, re.IGNORECASE):
            yield int(float(step)), loss


def _flat(row: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and value of all entries of a row, also of nested ones; `train/Loss` becomes `train_loss`."""
    for name, value in row.items() if isinstance(row, Mapping) else ():
        simple = re.sub(r"[^a-z0-9]+", "_", f"{prefix}{name}".lower()).strip("_")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{simple}_")
        elif isinstance(value, str | int | float):
            yield simple, str(value).strip()


def _names(said: Iterable[str], known: Sequence[str], word: str) -> list[str]:
    """Return the names that may hold the wanted value, the likeliest first."""
    others = [name for name in said if word in (words := name.split("_")) and NOT_OF_TRAINING.isdisjoint(words)]
    return [*known, *others]


def _half_unit(written: str) -> float:
    """Return half a unit of a number's last digit."""
    digits, _, exponent = written.lower().partition("e")
    return 0.5 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def compare_files(run: Path, other: Path) -> tuple[str, bool]:
    """Compare a run with another program; return a text of a few lines, and whether the losses are equal.

    Raises UserError for a file that cannot be read, and if both have no step in common.
    """
    own = read_curve(run)
    theirs = read_curve(other)
    precision = _precision(run)
    offset, mean_of = _alignment(own, theirs)
    steps = sorted(step for step in theirs.losses if step + offset in own.losses)
    if not steps:
        raise UserError(f"{other}: has no step in common with {run}: {_span(theirs)} and {_span(own)}")
    lines = [f"{len(steps)} steps compared ({_span(own)} and {_span(theirs)}), {precision}"]
    if offset:
        lines.append(f"the other program counts from {min(theirs.losses)}: its step {steps[0]} is {steps[0] + offset}")
    if mean_of > 1:
        lines.append(f"its losses are means of {mean_of} steps")
    worst = 0.0
    first, growth = ALLOWED[precision]
    for step in steps:
        at = step + offset
        wanted = mean(own.losses[each] for each in range(at - mean_of + 1, at + 1) if each in own.losses)
        off = abs(theirs.losses[step] - wanted)
        allowed = (first + growth * at) * abs(wanted) + theirs.digits[step] + own.digits[at]
        if not off <= allowed:  # not so for NaN
            values = f"{wanted:.7g} and {theirs.losses[step]:.7g}"
            apart = f"{values} differ by {off:.1e}; rounding allows {allowed:.1e}"
            lines.append(f"the losses diverge at step {at}: {apart}")
            return "\n".join(lines), False
        worst = max(worst, off / max(abs(wanted), 1e-30))
    return "\n".join([*lines, f"equal up to rounding: the largest relative difference is {worst:.1e}"]), True


def _alignment(own: Curve, theirs: Curve) -> tuple[int, int]:
    """Return the offset of the other program's step numbers, and the number of steps over which it averages a loss.

    The pair is chosen with which the first loss of both programs agrees best.
    """
    steps = sorted(theirs.losses)
    stride = min((b - a for a, b in pairwise(steps)), default=1)

    def off_by(candidate: tuple[int, int]) -> float:
        offset, mean_of = candidate
        for step in steps:
            values = [own.losses.get(each) for each in range(step + offset - mean_of + 1, step + offset + 1)]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                return abs(theirs.losses[step] - mean(known))
        return float("inf")

    return min(((offset, mean_of) for offset in (0, 1) for mean_of in sorted({1, stride})), key=off_by)


def _precision(run: Path) -> str:
    """Return the precision of a run from its run.json; fp32 if it is not known."""
    found = object_or_empty((run if run.is_dir() else run.parent) / RUN)
    return next((name for name in ("bf16", "fp16") if lookup(found, f"/config/{name}/enabled")), "fp32")


def _span(curve: Curve) -> str:
    return f"steps {min(curve.losses)} to {max(curve.losses)}"
