"""What a report says in figures and tables, beside its charts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.config.check import check
from harness.config.text.document import from_values
from harness.config.values.layout_keys import ZERO_BUBBLE
from harness.errors import UserError
from harness.planner.estimate import Estimate, Prediction
from harness.report.profile.summary import summary
from harness.report.run_files import RunFiles
from harness.wording import counted

LEFT_OUT = ("/arguments/output_dir", "/arguments/overwrite_output_dir")  # differ in any two runs
AXES = {"pipeline": "pp", "tensor": "tp", "data": "dp"}


@dataclass(frozen=True)
class Fact:
    """A number to show large, with what it is; `note` says more."""

    value: str
    label: str
    note: str = ""


def facts(run: RunFiles) -> list[Fact]:
    """Return what to know of a run at first sight."""
    found = []
    if run.steps:
        last = run.steps[-1]
        found.append(Fact(f"{last['step']:,}", "steps"))
        if isinstance(last.get("loss"), int | float):
            found.append(Fact(f"{last['loss']:.4f}", "last loss"))
        found += _median(run, "tokens_per_second", "tokens/s", "{:,.0f}")
        found += _median(run, "step_seconds", "seconds a step", "{:.3g}")
    if run.layout:
        sizes = [f"{short}{run.layout[axis]}" for axis, short in AXES.items() if run.layout.get(axis, 1) != 1]
        found.append(Fact(" × ".join(sizes) or "one rank", "layout", counted(run.layout.get("world_size", 1), "rank")))
    if isinstance(run.about.get("parameters"), int):
        found.append(Fact(f"{run.about['parameters'] / 1e6:,.1f} M", "parameters"))
    return found


def _median(run: RunFiles, key: str, label: str, form: str) -> Iterator[Fact]:
    values = [row[key] for row in run.steps if isinstance(row.get(key), int | float)]
    if values:
        yield Fact(form.format(median(values)), label, "median")


def step_facts(run: RunFiles, predicted: Prediction | None) -> list[Fact]:
    """Return what the profiled steps come to: the bubble beside its prediction."""
    if not run.profiles:
        return []
    found, facts = summary(run.profiles), []
    seconds = found["step_seconds"]
    facts.append(Fact(f"{seconds * 1e3:,.1f} ms", "a profiled step", f"median of {len(run.profiles)}"))
    if isinstance(predicted, Estimate):
        facts.append(Fact(f"{predicted.seconds.total * 1e3:,.1f} ms", "a step, predicted", predicted.hardware.name))
    if found["bubble"] is not None:
        shares = found["bubble"]
        p, m, schedule = run.profiles[-1].pp_size, found["micro_batches"], run.profiles[-1].schedule
        v = run.profiles[-1].parts_per_stage
        of_parts = f" of {v} parts" if v > 1 else ""
        how = (
            f"({p} - 1) / ({m} + {p} - 1)"
            if schedule != ZERO_BUBBLE and v == 1
            else f"{schedule}, {p} stages{of_parts}, {m} micro-batches"
        )
        facts.append(Fact(f"{shares['measured']:.1%}", "bubble, measured", "time in which a stage does not compute"))
        facts.append(Fact(f"{shares['unequal']:.1%}", "predicted, these stages", "by their measured times"))
        facts.append(Fact(f"{shares['balanced']:.1%}", "predicted, equal stages", how))
    return facts


def diagnostics(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return what the check finds in a run's config: severity, code, and what to do."""
    try:
        found = check(from_values(run.config), world_size=run.layout.get("world_size")) if run.config else []
    except UserError as error:
        return [("error", "", str(error))]
    return [
        (str(item.severity.value), item.code, f"{item.pointer}: {item.message}{f' ({item.hint})' if item.hint else ''}")
        for item in found
    ]


def differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, with the value of each."""
    flat = [
        dict(_flat({name: run.about.get(name) for name in ("config", "arguments", "layout", "versions")}))
        for run in runs
    ]
    names = sorted({name for one in flat for name in one})
    rows = [(name, [json.dumps(one.get(name), default=str) for one in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in LEFT_OUT]


def _flat(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{at}/{name}")
    else:
        yield at, value
