"""How the numbers of runs went over their steps, and what happened on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from harness.report.charts import Line, LineChart, Mark
from harness.report.palette import of_run
from harness.report.run_files import RunFiles

MOST_POINTS = 4000  # of a curve; a screen has not more columns
Point = tuple[float, float | None]
SHOWN = {
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
}
"""The curves by their names in `metrics.jsonl`, with their titles."""


def curves(runs: Sequence[RunFiles]) -> list[LineChart]:
    """Return a chart for each curve that any run has."""
    marks = [mark for run in runs for mark in marks_of(run, with_name=len(runs) > 1)]
    charts = []
    for key, title in SHOWN.items():
        lines = [line for number, run in enumerate(runs) for line in _lines(run, key, of_run(number), len(runs) > 1)]
        if lines:
            charts.append(LineChart(key=key, title=title, lines=lines, marks=marks))
    return charts


def marks_of(run: RunFiles, *, with_name: bool = False) -> list[Mark]:
    """Return what happened to a run, by step."""
    ending = f" ({run.name})" if with_name else ""
    found = [Mark(x=step, kind="checkpoint", text=f"checkpoint at step {step}{ending}") for step in run.checkpoints]
    found += [
        Mark(
            x=row["step"],
            kind="restart",
            text=f"restart after a failure in step {row['step']}: {row.get('cause')}{ending}",
        )
        for row in run.restarts
    ]
    found += [
        Mark(x=step, kind="rollback", text=f"rollback: {samples} samples are left out before step {step}{ending}")
        for step, samples in _left_out(run)
    ]
    return sorted(found, key=lambda mark: mark.x)


def _left_out(run: RunFiles) -> Iterator[tuple[int, int]]:
    """Yield the steps before which samples were left out, and how many: a rollback does that."""
    batch = run.config.get("train_batch_size")
    counted = [(row["step"], row.get("consumed_samples")) for row in run.steps]
    for (step, samples), (next_step, next_samples) in pairwise(counted):
        if isinstance(batch, int) and isinstance(samples, int) and isinstance(next_samples, int):
            more = next_samples - samples - batch * (next_step - step)
            if more > 0 and next_step == step + 1:
                yield next_step, more


def _lines(run: RunFiles, key: str, color: str, is_named: bool) -> Iterator[Line]:
    values = thinned([(row["step"], _number(row.get(key))) for row in run.steps])
    if any(value is not None for _, value in values):
        x, y = zip(*values, strict=True)
        yield Line(name=run.name if is_named else "training", color=color, x=x, y=y)
    for number, (name, title) in enumerate(_evaluations(run, key).items()):
        points = [(row["step"], value) for row in run.evaluations if (value := _number(row.get(name))) is not None]
        if points:
            x, y = zip(*points, strict=True)
            label, own = (f"{run.name}, {title}", color) if is_named else (title, of_run(number))
            yield Line(name=label, color=own, x=x, y=y, is_points=True)


def _evaluations(run: RunFiles, key: str) -> dict[str, str]:
    """Return the titles of a curve by its names in the evaluations: one, or one for each named data set."""
    names = dict.fromkeys(name for row in run.evaluations for name in row)
    named = {name: match[1] for name in names if (match := re.fullmatch(rf"eval_(.+)_{key}", name))}
    return {f"eval_{key}": "evaluation"} | {name: f"evaluation on {title}" for name, title in named.items()}


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points that can be seen: of each stretch of a long curve the lowest, the highest, and a gap."""
    stretch = 2 * -(-len(points) // MOST_POINTS)
    if len(points) <= MOST_POINTS:
        return points
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        there = sorted((point for point in part if point[1] is not None), key=lambda point: point[1] or 0.0)
        gaps = [point for point in part if point[1] is None]
        kept += sorted({*there[:1], *there[-1:], *gaps[:1]})
    return kept


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None  # type: ignore[arg-type]
