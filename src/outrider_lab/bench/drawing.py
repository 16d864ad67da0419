"""Charts as pictures: the one place that draws, light and dark, the same bytes for the same data.

Altair describes a chart in Vega-Lite; vl-convert lays it out and writes SVG and PNG, without a
browser or a network. The rows of a layer are records, whose keys are the channels of the layer.

Every picture exists for light and for dark pages. Hues are those of Okabe and Ito, which people
with the common kinds of colour blindness tell apart; an ordered quantity has steps of one ramp
(viridis), and plain decoding is grey. No date and no random identifier enters a file.

Altair is an optional dependency with a slow import; only this module touches it, when it draws.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from outrider.core.plugins import install_command
from outrider_lab.bench.charts import (
    Axis,
    Bars,
    Chart,
    Color,
    Dots,
    Lines,
    Panel,
    Squares,
    TimelineChart,
)

# Pixels, as CSS counts them: of a picture, of an inch, and of the words around a panel.
_WIDTH = 864
_INCH = 96
_AROUND = 52
_PNG_SCALE = 1.5
_MARK_SIZE = 45
_FONT = "Arial, Liberation Sans, Helvetica, sans-serif"
# More names than this along an axis are written small.
_MANY = 10
_DASHES = {"-": [], "--": [5, 4], ":": [1.5, 3]}
_MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
# A line without marks in the legend.
_STROKES = {"-": "stroke", "--": "M-1,0L-.25,0M.25,0L1,0", ":": "M-1,0L-.6,0M-.2,0L.2,0M.6,0L1,0"}
# Nine colours of the map viridis, at equal distances.
_VIRIDIS = (
    *("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c"),
    *("#28ae80", "#5ec962", "#addc30", "#fde725"),
)
Row = dict[str, Any]


def why_not() -> str | None:
    """Why no figure can be drawn here, or None."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    hint = install_command("bench")
    return f"no figures: {missing[0]} is not installed ({hint})" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one kind of page. `ramp` is the stretch of viridis that is readable on it;
    `diverging` runs from a loss over no change to a gain."""

    suffix: str
    hues: tuple[str, ...]
    ramp: tuple[float, float]
    diverging: tuple[str, str, str]
    named: Mapping[str, str]

    def color(self, color: Color) -> str:
        """A colour as #rrggbb. Raises KeyError for a name that the theme lacks."""
        if isinstance(color, str):
            return {"loss": self.diverging[0], "gain": self.diverging[2], **self.named}[color]
        if isinstance(color, int):
            return self.hues[color % len(self.hues)]
        low, high = self.ramp
        return _between(_VIRIDIS, low + (high - low) * color)

    def shade(self, value: float | None, *, diverging: bool) -> str:
        """The colour of a square; that of the page without a value."""
        if value is None:
            return self.named["page"]
        return _between(self.diverging, (value + 1) / 2) if diverging else self.color(float(value))


LIGHT = Theme(
    suffix="",
    hues=("#0072b2", "#d55e00", "#008060", "#a8457e", "#7a6a00", "#444444"),
    ramp=(0.0, 0.72),
    diverging=("#d55e00", "#f3f4f6", "#0072b2"),
    named={
        "page": "#ffffff",
        "ink": "#1f2328",
        "muted": "#6e7781",
        "faint": "#e3e6ea",
        "draft": "#e69f00",
        "target": "#0072b2",
        "accept": "#009e73",
        "other": "#7d8790",
    },
)
DARK = Theme(
    suffix="-dark",
    hues=("#56b4e9", "#f0883e", "#2bcb9c", "#e79bc4", "#f0e442", "#c9d1d9"),
    ramp=(0.42, 1.0),
    diverging=("#c2540a", "#22272e", "#2f81c7"),
    named={
        "page": "#0d1117",
        "ink": "#e6edf3",
        "muted": "#9198a1",
        "faint": "#2a313a",
        "draft": "#f0b43c",
        "target": "#56b4e9",
        "accept": "#2bcb9c",
        "other": "#8b949e",
    },
)
THEMES = (LIGHT, DARK)


def svg(chart: Chart, theme: Theme) -> bytes:
    schemas: Any = import_module("altair.utils.schemapi")
    stream = StringIO()
    # The whole chart is checked when it is saved, so its parts need not be.
    with schemas.debug_mode(False):
        altair_chart(chart, theme).save(stream, format="svg")
    text = stream.getvalue()
    # Vega counts clips over all pictures of a process.
    clips = list(dict.fromkeys(re.findall(r"clip\d+", text)))
    return re.sub(r"clip\d+", lambda clip: f"clip{clips.index(clip[0])}", text).encode()


def write(chart: Chart, folder: Path, name: str) -> list[Path]:
    """SVG for pages and PNG for everything else, light and dark."""
    vl_convert: Any = import_module("vl_convert")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for theme in THEMES:
        picture = svg(chart, theme)
        paths = [folder / f"{name}{theme.suffix}.{kind}" for kind in ("svg", "png")]
        paths[0].write_bytes(picture)
        paths[1].write_bytes(vl_convert.svg_to_png(picture.decode(), scale=_PNG_SCALE))
        written += paths
    return written


def write_all(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Every chart by the name of its files."""
    return [path for name, chart in charts.items() for path in write(chart, folder, name)]


def altair_chart(chart: Chart, theme: Theme = LIGHT) -> Any:
    """The chart as an `altair.ConcatChart`, which notebooks show."""
    alt: Any = import_module("altair")
    names: dict[str, Row] = {}
    columns, last = max(map(len, chart.panels)), len(chart.panels) - 1
    width = max(40.0, _WIDTH / columns - _AROUND)
    rows: list[list[Any]] = []
    for number, panels in enumerate(chart.panels):
        drawn: list[Any] = []
        for column, panel in enumerate(panels):
            labels = chart.share != "x" or number == last, chart.share != "y" or column == 0
            pen = _Pen(alt, theme, names, width, *_positions(alt, panel, labels))
            axes = _nothing(alt).encode(x=pen.x, y=pen.y)
            heading = alt.Title(panel.title, anchor="start", fontSize=13)
            layers = alt.layer(axes, *_LAYERS[type(panel)](panel, pen))
            drawn.append(layers.properties(title=heading) if panel.title else layers)
        rows.append([*drawn, *[alt.layer(_nothing(alt))] * (columns - len(panels))])
    rows[0][0] += _legend(alt, names)
    shares = chart.heights or [1.0] * len(rows)
    free = _INCH * chart.height - _AROUND * (1 + len(rows))
    cells = [
        cell.properties(width=width, height=max(24.0, free * share / sum(shares)))
        for row, share in zip(rows, shares, strict=True)
        for cell in row
    ]
    picture = alt.concat(*cells, columns=columns, align="each", spacing=18)
    if chart.share:
        picture = picture.resolve_scale(**{chart.share: "shared"})
    title = alt.Title(chart.title, subtitle=chart.foot, anchor="start", offset=12)
    return _dressed(picture.properties(title=title), theme)


def _nothing(alt: Any) -> Any:
    return alt.Chart(alt.Data(values=[])).mark_point(opacity=1)


def _dressed(picture: Any, theme: Theme) -> Any:
    page, ink, muted, faint = (theme.named[name] for name in ("page", "ink", "muted", "faint"))
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 11, "labelLimit": 0}
    lines = {"domainColor": muted, "gridColor": faint, "ticks": False, "labelPadding": 5}
    small = {"subtitleColor": muted, "subtitleFontSize": 10.5, "subtitlePadding": 5}
    # Pages have words of their own for readers who cannot see the picture.
    whole = picture.configure(background=page, aria=False, font=_FONT).configure_view(stroke=None)
    return (
        whole.configure_axis(**words, **lines, titleFontSize=12, titleFontWeight="normal")
        .configure_legend(**words, symbolSize=2 * _MARK_SIZE, symbolStrokeWidth=1.8)
        .configure_title(color=ink, fontSize=15, **small)
    )


def _legend(alt: Any, names: Mapping[str, Row]) -> Any:
    """A layer without marks whose legend has every name once, with its symbol."""
    own = alt.Legend(title=None, labelExpr=r"split(datum.label, '\n')")

    channels: list[Any] = []
    for make in (alt.Fill, alt.Stroke, alt.Shape) if names else ():
        symbols = [symbol[make.__name__.lower()] for symbol in names.values()]
        scale = alt.Scale(domain=list(names), range=symbols)
        channels.append(make("name:N", scale=scale, legend=own))
    return _nothing(alt).encode(*channels)


@dataclass(frozen=True, slots=True)
class _Pen:
    """Makes the layers of a panel of `width` pixels; `names` collects the symbols of the legend."""

    alt: Any
    theme: Theme
    names: dict[str, Row]
    width: float
    x: Any
    y: Any

    def color(
        self, color: Color, name: str = "", shape: str = "square", *, hollow: bool = False
    ) -> Row:
        """The channels of a thing's colour; one with a name gets its symbol in the legend."""
        own = self.theme.color(color)
        if name:
            fill = self.theme.named["page"] if hollow else own
            self.names.setdefault(name, {"fill": fill, "stroke": own, "shape": shape})
        return {"color": own}

    def layer(self, mark: str, rows: Sequence[Row], **look: Any) -> Iterator[Any]:
        """A layer whose channels are the keys of its rows; none without rows."""
        if not rows:
            return
        alt = self.alt
        given = {"x": self.x, "y": self.y, "x2": alt.X2("x2"), "y2": alt.Y2("y2")}
        given |= {"right": alt.XValue(self.width), "text": alt.Text("text:N")}
        given |= {"line": alt.Detail("line:N"), "order": alt.Order("order:Q")}
        for name in {"color", "fill", "stroke", "shape"} & rows[0].keys():
            given[name] = getattr(alt, name.title())(f"{name}:N", scale=None)
        chart = alt.Chart(alt.Data(values=list(rows)))
        yield getattr(chart, f"mark_{mark}")(**look).encode(*(given[key] for key in rows[0]))


def _lines(panel: Lines, pen: _Pen) -> Iterator[Any]:
    band = [{"x": x, "y": low, "y2": high} for x, low, high in panel.band]
    yield from pen.layer("area", band, color=pen.theme.named["faint"], clip=True)
    paths = defaultdict[tuple[float, str, bool], list[Row]](list)
    spans, marks, texts = list[Row](), list[Row](), list[Row]()
    for number, line in enumerate(panel.lines):
        if not line.points:
            continue
        mark = None if line.mark is None else _MARKS[line.mark % len(_MARKS)]
        color = pen.color(line.color, line.name, mark or _STROKES[line.dash], hollow=line.hollow)
        points = [{"x": x, "y": y, **color} for x, y in line.points]
        fill = pen.theme.named["page"] if line.hollow else color["color"]
        if line.dash:
            paths[line.width, line.dash, line.steps] += [
                {**point, "line": number, "order": order} for order, point in enumerate(points)
            ]
        if mark:
            marks += [{**point, "fill": fill, "shape": mark} for point in points]
        for point, (low, high) in zip(points, line.spans, strict=False):
            spans.append({**point, "y": low, "y2": high})
        for point, text in zip(points, line.texts, strict=False):
            texts.append({**point, "text": text})
    # Broad lines lie below the others.
    for (width, dash, steps), rows in sorted(paths.items(), key=lambda path: -path[0][0]):
        look = {"strokeWidth": width, "strokeDash": _DASHES[dash]}
        join = "step-after" if steps else "linear"
        yield from pen.layer("line", rows, interpolate=join, clip=True, **look)
    yield from pen.layer("rule", spans, strokeWidth=1.2, clip=True)
    yield from pen.layer("point", marks, size=_MARK_SIZE, opacity=1)
    yield from pen.layer("text", texts, align="left", dx=5, dy=-6, fontSize=10)
    yield from _levels(panel.levels, pen)


def _levels(levels: Sequence[tuple[str, float]], pen: _Pen) -> Iterator[Any]:
    rows = [{"y": y, **pen.color("muted", name, _STROKES["--"])} for name, y in levels]
    yield from pen.layer("rule", rows, strokeDash=_DASHES["--"], strokeWidth=1.2, clip=True)


def _bars(panel: Bars, pen: _Pen) -> Iterator[Any]:
    tops = defaultdict[int, float](float)
    rows = list[Row]()
    for name, color, heights in panel.parts:
        channels = pen.color(color, name)
        for number, height in enumerate(heights):
            ends = {"x": number - 0.375, "x2": number + 0.375, "y": tops[number]}
            tops[number] += height
            rows.append({**ends, "y2": tops[number], **channels})
    yield from pen.layer("rect", rows, clip=True)
    yield from _levels(panel.levels, pen)


def _dots(panel: Dots, pen: _Pen) -> Iterator[Any]:
    yield from pen.layer("rule", [{"x": 1, **pen.color("muted")}], strokeWidth=1)
    dots = [(row, dot) for row, dot in enumerate(panel.dots) if dot is not None]
    marks = [{"x": dot.value, "y": row, **pen.color(dot.color)} for row, dot in dots]
    ends = [{"x": dot.span[0], "x2": dot.span[1]} for _, dot in dots]
    spans = [{**mark, **span} for mark, span in zip(marks, ends, strict=True)]
    yield from pen.layer("rule", spans, strokeWidth=2, clip=True)
    yield from pen.layer("circle", marks, size=_MARK_SIZE, opacity=1)
    texts = [{"right": 1, "y": row, "text": dot.text, **pen.color("ink")} for row, dot in dots]
    yield from pen.layer("text", texts, align="left", dx=8, fontSize=10)


def _squares(panel: Squares, pen: _Pen) -> Iterator[Any]:
    rows, words = list[Row](), defaultdict[int, list[Row]](list)
    for row, squares in enumerate(panel.squares):
        for column, square in enumerate(squares):
            color = pen.theme.shade(square.value, diverging=panel.diverging)
            ends = {"x": column - 0.48, "x2": column + 0.48, "y": row - 0.46, "y2": row + 0.46}
            rows.append({**ends, "color": color})
            middle = {"x": column, "y": row, "color": readable_on(color)}
            words[-7 if square.small else 0].append({**middle, "text": square.text})
            words[7] += [{**middle, "text": square.small}] if square.small else []
    yield from pen.layer("rect", rows)
    for down, texts in words.items():
        yield from pen.layer("text", texts, dy=down, fontSize=11)


def _timeline(panel: TimelineChart, pen: _Pen) -> Iterator[Any]:
    rows = list[Row]()
    for job in panel.jobs:
        ends = {"x": job.span[0], "x2": job.span[1], "y": job.row - 0.34, "y2": job.row + 0.34}
        fill = pen.color(job.color, job.name)["color"]
        rows.append(
            {**ends, "fill": fill, "stroke": pen.theme.named["page"] if job.edged else fill}
        )
    yield from pen.layer("rect", rows, strokeWidth=0.5, clip=True)


_LAYERS: Mapping[type, Callable[[Any, _Pen], Iterator[Any]]] = {
    Lines: _lines,
    Bars: _bars,
    Dots: _dots,
    Squares: _squares,
    TimelineChart: _timeline,
}


def _positions(alt: Any, panel: Panel, labels: tuple[bool, bool]) -> Iterator[Any]:
    """The channels `alt.X` and `alt.Y` with their scales and axes; names of rows run downwards."""
    x, y, domain, grids = panel.x, Axis(), True, (False, False)
    match panel:
        case Lines() | Bars():
            y, grids = panel.y, (panel.x.scale != "linear", True)
        case Dots():
            y, grids = _downwards(panel.names), (True, False)
        case Squares():
            x, y = replace(x, ticks=panel.columns), _downwards(panel.rows)
        case TimelineChart():
            y, domain = _downwards(panel.rows), False
    for make, axis, grid, shown in zip((alt.X, alt.Y), (x, y), grids, labels, strict=True):
        title = axis.label.split("\n") if axis.label else None
        look = {"title": title, "grid": grid, "labels": shown, "domain": domain, **_ticks(axis)}
        yield make(
            f"{make.__name__.lower()}:Q", scale=alt.Scale(**_scale(axis)), axis=alt.Axis(**look)
        )


def _downwards(names: Sequence[str]) -> Axis:
    return Axis(ticks=names, low=len(names) - 0.5, high=-0.5)


def _scale(axis: Axis) -> Row:
    low, high = axis.low, axis.high
    if axis.ticks and not isinstance(axis.ticks, Mapping):
        ends = -0.5 if low is None else low, len(axis.ticks) - 0.5 if high is None else high
        return {"domain": ends, "nice": False}
    kind: Row = {"type": "linear", "zero": False} if axis.scale == "linear" else {"type": "log"}
    ends = {"domainMin": low, "domainMax": high}
    known = {name: end for name, end in ends.items() if end is not None}
    return {**kind, **known, "nice": len(known) == 1, "padding": 0 if known else 10}


def _ticks(axis: Axis) -> Row:
    """Positions of ticks and their names, of which each line is a line; numbers of a free axis."""
    ticks = axis.ticks if isinstance(axis.ticks, Mapping) else dict(enumerate(axis.ticks))
    if not ticks:
        return {"format": "~g"} if axis.scale != "linear" else {"tickCount": 6}
    positions = list(ticks)
    names = json.dumps([name.split("\n") for name in ticks.values()])
    look = {"labelFontSize": 9} if len(ticks) > _MANY else {}
    named = f"{names}[indexof({json.dumps(positions)}, datum.value)]"
    return {"values": positions, "labelExpr": named, "labelOverlap": False, **look}


def _between(stops: Sequence[str], share: float) -> str:
    """The colour at `share`, from 0.0 to 1.0, of a way through colours at equal distances."""
    at = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    first = min(int(at), len(stops) - 2)
    ends = zip(_rgb(stops[first]), _rgb(stops[first + 1]), strict=True)
    mixed = (round(255 * (low + (at - first) * (high - low))) for low, high in ends)
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _rgb(color: str) -> list[float]:
    """Red, green and blue of #rrggbb, each from 0.0 to 1.0."""
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def readable_on(color: str) -> str:
    """Black or white, whichever stands out from #rrggbb (relative luminance, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in _rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"
