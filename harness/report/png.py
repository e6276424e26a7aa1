"""Draw charts as PNG files, for papers, with matplotlib, which needs no browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from harness.report.charts import OF_MARK, PALE, BarChart, Chart, LineChart
from harness.report.page import RunCharts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
WIDTH, HEIGHT, ROW = 7.0, 2.6, 0.32  # inches
OPAQUE = {PALE: "#dfe1e5"}
NARROWEST_TEXT = 0.02  # bars narrower than this share of the chart's width get no number
MOST_COLUMN_NAMES, LONGEST_LEVEL_NAME = 16, 4  # names below columns, and letters of one that is not slanted
STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def write_pngs(folder: Path, curves: Sequence[Chart], runs: Sequence[RunCharts], pyplot: ModuleType) -> list[Path]:
    """Write each chart to `KEY.png`, or `RUN-KEY.png` if there are several runs, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    named = [(chart.key, chart) for chart in curves]
    for one in runs:
        prefix = f"{one.run.name.replace('/', '-')}-" if len(runs) > 1 else ""
        named += [(f"{prefix}{chart.key}", chart) for chart in one.charts]
    paths = []
    with pyplot.rc_context(STYLE):
        for name, chart in named:
            paths.append(folder / f"{name}.png")
            picture = _lines(chart, pyplot) if isinstance(chart, LineChart) else _bars(chart, pyplot)
            picture.savefig(paths[-1], dpi=DOTS_PER_INCH)
            pyplot.close(picture)
    return paths


def _lines(chart: LineChart, pyplot: ModuleType) -> Figure:
    picture: Figure
    picture, axes = pyplot.subplots(figsize=(WIDTH / 2, HEIGHT), layout="constrained")
    for line in chart.lines:
        values = [float("nan") if value is None else value for value in line.y]
        marker = "D" if line.is_points else ""
        axes.plot(
            line.x, values, color=line.color, lw=0 if line.is_points else 1.2, marker=marker, ms=3, label=line.name
        )
    for kind, color in OF_MARK.items():
        for number, mark in enumerate(mark for mark in chart.marks if mark.kind == kind):
            axes.axvline(mark.x, color=color, lw=0.8, ls=":", zorder=0, label=None if number else kind)
    axes.set(xlabel="step", ylabel=chart.title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend()
    return picture


def _bars(chart: BarChart, pyplot: ModuleType) -> Figure:
    height = HEIGHT if chart.is_upright else 1.0 + ROW * len(chart.rows)
    picture: Figure
    picture, axes = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
    place = {row: number for number, row in enumerate(chart.rows)}
    shown = [bars for bars in chart.bars if not bars.is_hidden]
    widest = max(a + b for bars in shown for a, b in zip(bars.starts, bars.lengths, strict=True))
    for bars in shown:
        at = [place[row] for row in bars.rows]
        color = OPAQUE.get(bars.color, bars.color)
        if chart.is_upright:
            axes.bar(at, bars.lengths, bottom=bars.starts, color=color, label=bars.name, width=0.8)
        else:
            axes.barh(at, bars.lengths, left=bars.starts, color=color, label=bars.name, height=0.8, lw=0.3, ec="white")
        for text, middle, start, length in zip(bars.texts, at, bars.starts, bars.lengths, strict=False):
            if length > widest * NARROWEST_TEXT:
                axes.text(start + length / 2, middle, text, color="white", ha="center", va="center", fontsize=6.5)
    if chart.is_upright:
        named = range(0, len(chart.rows), -(-len(chart.rows) // MOST_COLUMN_NAMES))
        is_long = max(len(row) for row in chart.rows) > LONGEST_LEVEL_NAME
        axes.set(ylabel=chart.axis, xlabel=chart.across)
        axes.set_xticks(named, [chart.rows[number] for number in named], rotation=35 if is_long else 0)
        for before, text in chart.dividers:
            axes.axvline(before - 0.5, color="#8a8f98", lw=0.8, ls=":" if before else "")
            axes.text(before - 0.45, 1.0, text, transform=axes.get_xaxis_transform(), va="bottom", fontsize=7)
    else:
        axes.set(xlabel=chart.axis, ylabel=chart.across, xlim=(0, widest))
        axes.set_yticks(range(len(chart.rows)), chart.rows)
        axes.invert_yaxis()
    if len(shown) > 1:
        picture.legend(loc="outside upper center", ncols=min(4, len(shown)), handlelength=1.0)
    return picture
