"""Write charts as plotly's JSON. Colours of text, axes and edges come from the page, which may be light or dark."""

from __future__ import annotations

from harness.config.values.json_object import JsonObject
from harness.report.charts import OF_MARK, BarChart, Bars, Chart, LineChart

ROW_PIXELS = 34
MOST_SHOWN_MARKS = 40  # more lines would cover the curve
FEW_STEPS = 10  # up to this number each step has a tick
LEGEND = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal", "font": {"size": 12}}


def figure(chart: Chart) -> JsonObject:
    """Return a chart's `data` and `layout`."""
    return _lines(chart) if isinstance(chart, LineChart) else _bars(chart)


def _lines(chart: LineChart) -> JsonObject:
    data: list[JsonObject] = []
    for line in chart.lines:
        style = {"mode": "markers", "marker": {"color": line.color, "size": 8, "symbol": "diamond"}}
        if not line.is_points:
            style = {"mode": "lines" if len(line.x) > 1 else "markers", "line": {"color": line.color, "width": 1.8}}
        data.append({"type": "scatter", "name": line.name, "x": list(line.x), "y": list(line.y), **style})
    kinds = [kind for kind in OF_MARK if any(mark.kind == kind for mark in chart.marks)]
    for kind in kinds:
        marks = [mark for mark in chart.marks if mark.kind == kind]
        data.append(
            {
                "type": "scatter",
                "name": kind,
                "mode": "markers",
                "x": [mark.x for mark in marks],
                "y": [0.02] * len(marks),
                "yaxis": "y2",
                "text": [mark.text for mark in marks],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": OF_MARK[kind], "size": 9, "symbol": "triangle-up"},
            }
        )
    is_short = len({x for line in chart.lines for x in line.x}) <= FEW_STEPS
    shown = [mark for mark in chart.marks if mark.kind != "checkpoint"][:MOST_SHOWN_MARKS]
    layout = {
        "height": 300,
        "margin": {"l": 64, "r": 16, "t": 40, "b": 44},
        "xaxis": {"title": {"text": "step"}, "zeroline": False, "tickformat": ",d", "dtick": 1 if is_short else None},
        "yaxis": {"zeroline": False, "exponentformat": "power"},
        # a second axis keeps marks on the lower edge, whatever the values of the curve are
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "shapes": [_line_at(mark.x, OF_MARK[mark.kind]) for mark in shown],
        "showlegend": len(data) > 1,
        "legend": LEGEND,
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def _line_at(x: float, color: str) -> JsonObject:
    line = {"color": color, "width": 1.2, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line, "layer": "below"}


def _bars(chart: BarChart) -> JsonObject:
    along, across = ("y", "x") if chart.is_upright else ("x", "y")
    lengths = {"title": {"text": chart.axis}, "zeroline": False, "tickformat": ",~g"}
    rows: JsonObject = {"type": "category", "categoryorder": "array", "categoryarray": list(chart.rows)}
    rows |= {"ticks": "", "automargin": True}  # names may be long
    if chart.across:
        rows["title"] = {"text": chart.across}
    if not chart.is_upright:
        rows |= {"autorange": "reversed", "fixedrange": True}
    layout: JsonObject = {
        "barmode": "overlay",
        "bargap": 0.22 if chart.is_upright or len(chart.rows) < 9 else 0.1,
        "height": 330 if chart.is_upright else 118 + ROW_PIXELS * len(chart.rows),
        "margin": {"l": 64, "r": 16, "t": 40, "b": 48},
        f"{along}axis": lengths,
        f"{across}axis": rows,
        "legend": LEGEND,
        "showlegend": len(chart.bars) > 1,
        "hovermode": "closest",
        "uniformtext": {"minsize": 8, "mode": "hide"},
        "dragmode": "zoom" if chart.is_upright else "pan",
    }
    if chart.dividers:
        layout["shapes"] = [_line_at(at - 0.5, "#8a8f98") for at, _ in chart.dividers if at]
        layout["annotations"] = [_stage_label(at - 0.5, text) for at, text in chart.dividers]
    return {"data": [_pieces(bars, chart.is_upright) for bars in chart.bars], "layout": layout}


def _stage_label(x: float, text: str) -> JsonObject:
    place = {"x": x, "xanchor": "left", "xref": "x", "y": 1, "yanchor": "top", "yref": "paper", "xshift": 4}
    return {**place, "text": text, "showarrow": False, "font": {"size": 11}}


def _pieces(bars: Bars, is_upright: bool) -> JsonObject:
    along, across = ("y", "x") if is_upright else ("x", "y")
    return {
        "type": "bar",
        "orientation": "v" if is_upright else "h",
        "name": bars.name,
        along: list(bars.lengths),
        across: list(bars.rows),
        "base": list(bars.starts),
        "marker": {"color": bars.color, "line": {"width": 0.5}},
        "customdata": list(bars.hovers),
        "hovertemplate": "%{customdata}<extra></extra>",
        "text": list(bars.texts) or None,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "insidetextfont": {"color": "#ffffff"},
        "textangle": 0,
        "visible": "legendonly" if bars.is_hidden else True,
    }
