"""What a chart shows, whoever draws it: lines over steps, and bars of parts; and the colors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Colours that people with any colour vision tell apart, on white and on near-black.
#
# Source: Okabe and Ito 2008, Color Universal Design; blue and vermilion are a little lighter here, for dark pages.


BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = "#2b83c6", "#e0712c", "#009e73", "#cc79a7", "#e6b91e", "#56b4e9"
GREY, PALE = "#8a8f98", "rgba(138,143,152,0.28)"
RUNS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
DARKER = 0.62  # of each channel

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
    """Return a colour, given as #rrggbb, so many steps darker: white text stands out from all of them."""
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel * DARKER**steps):02x}" for channel in channels)


def of_run(number: int) -> str:
    """Return the colour of a run by its number."""
    return RUNS[number % len(RUNS)]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Values by step; None is a gap. `is_points`: single values, each worth a dot."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float | None]
    is_points: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
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
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The pieces of one kind: piece i is in `rows[i]`, from `starts[i]`, `lengths[i]` long.

    Attributes:
        texts: short ones to write into the pieces, shown where they fit.
        hovers: what to say of each piece.
        is_hidden: whether it is shown only when it is asked for.
    """

    name: str
    color: str
    rows: Sequence[str]
    starts: Sequence[float]
    lengths: Sequence[float]
    hovers: Sequence[str]
    texts: Sequence[str] = ()
    is_hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Rows of bars, the first one on top; or columns, from left to right.

    Attributes:
        axis: what lengths are, with the unit.
        dividers: before which column a line stands, and what to write to its right.
        note: a sentence below.
    """

    key: str
    title: str
    axis: str
    rows: Sequence[str]
    bars: Sequence[Bars]
    is_upright: bool = False
    dividers: Sequence[tuple[int, str]] = field(default=())
    note: str = ""


Chart = LineChart | BarChart
