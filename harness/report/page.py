"""The report as one HTML file that needs no network: plotly's program lies within it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from harness.planner.estimate import Prediction
from harness.planner.hardware import Hardware
from harness.report.charts import BarChart, Chart
from harness.report.curves import curves, marks_of
from harness.report.data_charts import data_charts
from harness.report.facts import Fact, diagnostics, differences, facts, step_facts
from harness.report.palette import of_run
from harness.report.plotly_figures import figure
from harness.report.predicted import measured_parts, predict_run
from harness.report.run_files import RunFiles
from harness.report.step_charts import step_charts

PARTS = Path(__file__).parent / "parts"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button">light or dark</button></header>
<main>
{content}
</main>
<script>{plotly}</script>
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class RunCharts:
    """A run with the charts of its step."""

    run: RunFiles
    predicted: Prediction | None
    charts: Sequence[BarChart]


def charts_of(
    runs: Sequence[RunFiles], hardware: Hardware | None = None
) -> tuple[Sequence[Chart], Sequence[RunCharts]]:
    """Return the curves of all runs, and the charts of each; times are predicted on the given hardware."""
    shown = []
    for run in runs:
        predicted = predict_run(run, hardware)
        memory = [measured_parts(stage) for stage in predicted.stages] if predicted else []
        shown.append(RunCharts(run, predicted, [*data_charts(run), *step_charts(run, memory)]))
    return curves(runs), shown


def page(curve_charts: Sequence[Chart], runs: Sequence[RunCharts], plotly: str) -> str:
    """Return the HTML; `plotly`: its program."""
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
        content.append(f"<section>{_heading(one.run, number, len(runs))}{tiles}{body}{_details(one.run)}</section>")
    names = [one.run.name for one in runs]
    return PAGE.format(
        title=escape(" and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"),
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        content="\n".join(content),
        plotly=plotly.replace("</script", "<\\/script"),
        figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
        script=(PARTS / "page.js").read_text(encoding="utf-8"),
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


def _heading(run: RunFiles, number: int, count: int) -> str:
    return f"<h2>{_swatch(number)}{escape(run.name)}</h2>" if count > 1 else ""


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background:{of_run(number)}"></span>'


def _tiles(found: Sequence[Fact]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(fact.value)}</b><span>{escape(fact.label)}</span>'
        f"<small>{escape(fact.note)}</small></div>"
        for fact in found
    )
    return f'<div class="tiles">{tiles}</div>' if tiles else ""


def _details(run: RunFiles) -> str:
    return "".join(f"<details><summary>{title}</summary>{body}</details>" for title, body in _tables(run))


def _tables(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yield what can be unfolded: title and HTML."""
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
    if "arguments" in run.about:
        yield "Arguments", f"<pre>{escape(json.dumps(run.about['arguments'], indent=2))}</pre>"
