"""What a chart shows, as data: panels of lines, bars, dots, cells or spans (drawing.py draws them).

A colour is a number of the theme's hues, a share of its ramp from 0.0 to 1.0, or one of its names
(drawing.py, `Theme.named`). What has a name is in the legend, which stands right of all panels and
names each thing once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from outrider.plugins.measure.turns import Ratio

Color = int | float | str
Point = tuple[float, float]
# Ends of an interval.
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`ticks` are names of the places 0, 1, 2, ..., or of places that a mapping gives; without
    them the places are numbers."""

    label: str = ""
    ticks: Sequence[str] | Mapping[float, str] = ()
    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log"] = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one colour, joined unless `dash` is empty, and marked by the mark of a number or
    not at all. `spans` are the intervals of the points, `texts` the words next to them."""

    points: Sequence[Point]
    color: Color
    name: str = ""
    spans: Sequence[Span] = ()
    texts: Sequence[str] = ()
    mark: int | None = None
    hollow: bool = False
    dash: Literal["", "-", "--", ":"] = "-"
    steps: bool = False
    width: float = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """`levels` are dashed horizontals with their names; `band` is an area between two lines of the
    same horizontal places: (place, low, high)."""

    lines: Sequence[Line]
    title: str = ""
    x: Axis = Axis()
    y: Axis = Axis(low=0)
    levels: Sequence[tuple[str, float]] = ()
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A bar for each tick of `x`, stacked from `parts`: name, colour, and a height for each bar."""

    parts: Sequence[tuple[str, Color, Sequence[float]]]
    x: Axis
    title: str = ""
    y: Axis = Axis(low=0)
    levels: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    name: str
    value: float
    span: Span
    color: Color
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Ratios from top to bottom, each with its interval, beside a line at 1. A dot that is None
    leaves its row, which `names` has, empty."""

    names: Sequence[str]
    dots: Sequence[Dot | None]
    title: str = ""
    x: Axis = Axis()


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """`text` is large, `small` below it. `value` is a share of the ramp, or of a `diverging` map
    from -1, a loss, over 0 to 1, a gain; None is left empty."""

    value: float | None
    text: str
    small: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    rows: Sequence[str]
    columns: Sequence[str]
    squares: Sequence[Sequence[Square]]
    title: str = ""
    x: Axis = Axis()
    diverging: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBar:
    """A stretch of time on a row, or a part of one."""

    row: int
    span: Span
    color: Color
    name: str = ""
    edged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    rows: Sequence[str]
    jobs: Sequence[JobBar]
    x: Axis = Axis()
    title: str = ""


Panel = Lines | Bars | Dots | Squares | TimelineChart


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Rows of panels. `foot` is the small print under the title, `height` in inches; `share` says
    which axes have one scale, and `heights` how high the rows are to each other."""

    title: str
    panels: Sequence[Sequence[Panel]]
    foot: str = ""
    height: float = 3.8
    share: Literal["", "x", "y"] = ""
    heights: Sequence[float] = field(default=())


def span_of(ratio: Ratio) -> Span:
    """The ends of its interval; of a ratio without one, the ratio. An interval that does not hold
    its ratio is stretched to it."""
    value = ratio.value
    low = value if ratio.low is None else ratio.low
    high = value if ratio.high is None else ratio.high
    return min(low, value), max(high, value)


def dot_of(name: str, ratio: Ratio, text: str = "") -> Dot:
    color = ratio.verdict if ratio.verdict in ("gain", "loss") else "muted"
    return Dot(name=name, value=ratio.value, span=span_of(ratio), color=color, text=text)


def rows_of(panels: Sequence[Panel], columns: int) -> list[Sequence[Panel]]:
    """`panels` in rows of so many."""
    return [panels[i : i + columns] for i in range(0, len(panels), columns)]
