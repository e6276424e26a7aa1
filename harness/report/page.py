"""Write the report as one HTML file that needs no network: plotly's JavaScript is part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

from harness.checking import check
from harness.config.text.document import from_values
from harness.errors import UserError
from harness.planner.estimate import Estimate
from harness.planner.hardware import Hardware
from harness.report.certificate import told
from harness.report.charts import BarChart, Chart, of_run
from harness.report.plotly_figures import figure
from harness.report.profile.summary import summary
from harness.report.run_charts import curves, data_charts, marks_of, step_charts
from harness.report.run_files import RunFiles, expected_parts, predict_run
from harness.schedules import named
from harness.wording import counted

LEFT_OUT = ("/arguments/output_dir", "/arguments/overwrite_output_dir")  # differ in any two runs
AXES = {"pipeline": "pp", "tensor": "tp", "data": "dp", "context": "cp"}
PARTS = Path(__file__).parent / "parts"


@dataclass(frozen=True)
class Fact:
    """A value to show large, with its label; `note` is small print."""

    value: str
    label: str
    note: str = ""


def facts(run: RunFiles) -> list[Fact]:
    """Return the key figures of a run."""
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
    if run.certificate:
        found.append(Fact(str(run.certificate.get("verdict")), "to one process", told(run.certificate)))
    return found


def _median(run: RunFiles, key: str, label: str, form: str) -> Iterator[Fact]:
    values = [row[key] for row in run.steps if isinstance(row.get(key), int | float)]
    if values:
        yield Fact(form.format(median(values)), label, "median")


def step_facts(run: RunFiles, predicted: Estimate | None) -> list[Fact]:
    """Return the key figures of the profiled steps: their time and their bubble, each beside its prediction."""
    if not run.profiles:
        return []
    found = summary(run.profiles)
    facts = []
    seconds = found["step_seconds"]
    facts.append(Fact(f"{seconds * 1e3:,.1f} ms", "a profiled step", f"median of {len(run.profiles)}"))
    if predicted is not None:
        facts.append(Fact(f"{predicted.seconds.total * 1e3:,.1f} ms", "a step, predicted", predicted.hardware.name))
    if found["bubble"] is not None:
        shares = found["bubble"]
        p = run.profiles[-1].pp_size
        m = found["micro_batches"]
        schedule = run.profiles[-1].schedule
        v = run.profiles[-1].chunks_per_stage
        of_chunks = f" of {v} chunks" if v > 1 else ""
        how = (
            f"({p} - 1) / ({m} + {p} - 1)"
            if not named(schedule).defers and v == 1
            else f"{schedule}, {p} stages{of_chunks}, {m} micro-batches"
        )
        facts.append(Fact(f"{shares['measured']:.1%}", "bubble, measured", "time in which a stage does not compute"))
        facts.append(Fact(f"{shares['unequal']:.1%}", "predicted, these stages", "by their measured times"))
        facts.append(Fact(f"{shares['balanced']:.1%}", "predicted, equal stages", how))
    return facts


def diagnostics(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the findings of `ds-harness check` on a run's config: severity, code, and message."""
    try:
        found = check(from_values(run.config), world_size=run.layout.get("world_size")) if run.config else []
    except UserError as error:
        return [("error", "", str(error))]
    return [
        (str(item.severity.value), item.code, f"{item.pointer}: {item.message}{f' ({item.hint})' if item.hint else ''}")
        for item in found
    ]


def differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, each with its value in every run."""
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


@dataclass(frozen=True)
class RunCharts:
    """A run with the charts of its step."""

    run: RunFiles
    predicted: Estimate | None
    charts: Sequence[BarChart]


def charts_of(
    runs: Sequence[RunFiles], hardware: Hardware | None = None
) -> tuple[Sequence[Chart], Sequence[RunCharts]]:
    """Return the curves of all runs, and the charts of each run; step times are predicted if `hardware` is given."""
    shown = []
    for run in runs:
        predicted = None if hardware is None else predict_run(run, hardware)
        shown.append(RunCharts(run, predicted, [*data_charts(run), *step_charts(run, expected_parts(run))]))
    return curves(runs), shown


def page(curve_charts: Sequence[Chart], runs: Sequence[RunCharts], plotly: str) -> str:
    """Return the HTML; `plotly` is its JavaScript source."""
    figures: dict[str, object] = {}

    def plot(chart: Chart, at: str) -> str:
        figures[at] = figure(chart)
        note = getattr(chart, "note", "")
        return (
            f'<figure><figcaption>{escape(chart.title)}</figcaption><div class="plot" id="{at}"></div>'
            f"{f'<p class=note>{escape(note)}</p>' if note else ''}</figure>"
        )

    content = [_overview(runs)]
    content.append(f'<section class="grid">{"".join(plot(chart, chart.key) for chart in curve_charts)}</section>')
    for number, one in enumerate(runs):
        body = "".join(plot(chart, f"{chart.key}-{number}") for chart in one.charts)
        tiles = _tiles(step_facts(one.run, one.predicted))
        heading = f"<h2>{_swatch(number)}{escape(one.run.name)}</h2>" if len(runs) > 1 else ""
        tables = "".join(f"<details><summary>{name}</summary>{table}</details>" for name, table in _tables(one.run))
        content.append(f"<section>{heading}{tiles}{body}{tables}</section>")
    names = [one.run.name for one in runs]
    return (
        (PARTS / "page.html")
        .read_text(encoding="utf-8")
        .format(
            title=escape(" and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"),
            style=(PARTS / "page.css").read_text(encoding="utf-8"),
            content="\n".join(content),
            plotly=plotly.replace("</script", "<\\/script"),
            figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
            script=(PARTS / "page.js").read_text(encoding="utf-8"),
        )
    )


def _overview(runs: Sequence[RunCharts]) -> str:
    if len(runs) == 1:
        return f"<section>{_tiles(facts(runs[0].run))}</section>"
    columns = [{fact.label: fact.value for fact in facts(one.run)} for one in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    head = "".join(f"<th>{_swatch(number)}{escape(one.run.name)}</th>" for number, one in enumerate(runs))
    rows = [(label, [column.get(label, "") for column in columns]) for label in labels]
    rows += differences([one.run for one in runs])
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f'<section class="wide"><table><tr><th></th>{head}</tr>{body}</table></section>'


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background:{of_run(number)}"></span>'


def _tiles(found: Sequence[Fact]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(fact.value)}</b><span>{escape(fact.label)}</span>'
        f"<small>{escape(fact.note)}</small></div>"
        for fact in found
    )
    return f'<div class="tiles">{tiles}</div>' if tiles else ""


def _tables(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yield the sections that can be unfolded: title and HTML."""
    marks = "".join(f"<li>{escape(mark.text)}</li>" for mark in marks_of(run))
    if marks:
        yield "Checkpoints, restarts, rollbacks", f"<ul>{marks}</ul>"
    if run.config:
        found = diagnostics(run)
        rows = "".join(
            f'<tr class="{one[0]}">{"".join(f"<td>{escape(word)}</td>" for word in one)}</tr>' for one in found
        )
        said = f"<table>{rows}</table>" if found else "<p>The check finds nothing wrong with it.</p>"
        yield "DeepSpeed config", f"{said}<pre>{escape(json.dumps(run.config, indent=2))}</pre>"
    origin = {name: run.about[name] for name in ("command", "date", "git", "hosts", "versions") if name in run.about}
    if origin:
        yield "Where it comes from", f"<pre>{escape(json.dumps(origin, indent=2))}</pre>"
    if run.certificate:
        yield "Certificate of its numbers", f"<pre>{escape(json.dumps(run.certificate, indent=2))}</pre>"
    if "arguments" in run.about:
        yield "Arguments", f"<pre>{escape(json.dumps(run.about['arguments'], indent=2))}</pre>"
