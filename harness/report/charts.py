"""The content of a chart (lines over steps, or bars) without the way it is drawn, and the colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Colours that people with any kind of colour vision can tell apart, on white and on near-black.
# Source: Okabe and Ito 2008, Color Universal Design; blue and vermilion are a little lighter here, for dark pages.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = "#2b83c6", "#e0712c", "#009e73", "#cc79a7", "#e6b91e", "#56b4e9"
GREY, PALE = "#8a8f98", "rgba(138,143,152,0.28)"
RUNS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
DARKER = 0.62  # factor for each colour channel

OF_KIND = {
    "forward": BLUE,
    "backward": ORANGE,
    "recompute": YELLOW,
    "send": SKY,
    "receive": GREEN,
    "reduce": PINK,
    "step": YELLOW,
    "data": GREY,
    "wait": PALE,
}
OF_MEMORY = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": PINK, "other": PALE}
OF_MARK = {"checkpoint": GREEN, "restart": ORANGE, "rollback": PINK}


def darker(color: str, steps: int) -> str:
    """Return a colour, given as #rrggbb, `steps` times darker; white text stays readable on it."""
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel * DARKER**steps):02x}" for channel in channels)


def of_run(number: int) -> str:
    """Return the colour of a run by its number."""
    return RUNS[number % len(RUNS)]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Values by step; None is a gap. `is_points`: draw each value as a dot."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float | None]
    is_points: bool = False


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """Something that happened at a step."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over the steps of one run or several."""

    key: str
    title: str
    lines: Sequence[Line]
    marks: Sequence[ChartMark] = ()


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars of one kind: bar i is in `rows[i]`, starts at `starts[i]`, and is `lengths[i]` long."""

    name: str
    color: str
    rows: Sequence[str]
    starts: Sequence[float]
    lengths: Sequence[float]
    hovers: Sequence[str]  # a text for each bar, shown when the pointer is on it
    texts: Sequence[str] = ()  # short texts to write into the bars if they fit
    is_hidden: bool = False  # until a click on its name in the legend


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Rows of bars, the first on top; or, if `is_upright`, columns from left to right.

    Attributes:
        axis: what the lengths mean, with their unit.
        across: what the rows or columns are; no title on their axis if empty.
        dividers: index of a column, and text: a line before the column, with the text to its right.
        note: a sentence below the chart.
    """

    key: str
    title: str
    axis: str
    across: str = ""
    rows: Sequence[str]
    bars: Sequence[Bars]
    is_upright: bool = False
    dividers: Sequence[tuple[int, str]] = field(default=())
    note: str = ""


Chart = LineChart | BarChart
