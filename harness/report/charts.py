"""What a chart shows, whoever draws it: lines over steps, and bars of parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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
