"""Charts as pictures: the one place that draws, light and dark, the same bytes for the same data.

Every picture exists for light and for dark pages. Hues are those of Okabe and Ito, which people
with the common kinds of colour blindness tell apart; an ordered quantity has steps of one ramp
(viridis), and plain decoding is grey. No date and no random identifier enters a file.

matplotlib is an optional dependency and has no complete types; only this module touches it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import as_file, files
from importlib.util import find_spec
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outrider_lab.bench.charts import (
    Axis,
    Bars,
    Chart,
    Color,
    Dots,
    Line,
    Lines,
    Panel,
    Squares,
    TimelineChart,
)

WIDTH_INCHES = 9.0
_DPI = 144
_DASHED = (0, (4, 3))
# More names than this along an axis are written small.
_MANY = 10
_TICKS = (1, 1.5, 2, 3, 5, 7)


def why_not() -> str | None:
    """Why no figure can be drawn here, or None."""
    if find_spec("matplotlib") is None:
        return "no figures: matplotlib is not installed (pip install 'outrider[bench]')"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one kind of page. `ramp` is the stretch of viridis that is readable on it;
    `diverging` runs from a loss over no change to a gain."""

    suffix: str
    hues: tuple[str, ...]
    ramp: tuple[float, float]
    diverging: tuple[str, str, str]
    named: Mapping[str, str]

    def color(self, color: Color) -> Any:
        if isinstance(color, str):
            return {"loss": self.diverging[0], "gain": self.diverging[2], **self.named}[color]
        if isinstance(color, int):
            return self.hues[color % len(self.hues)]
        from matplotlib import colormaps

        low, high = self.ramp
        return colormaps["viridis"](low + (high - low) * color)


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
    stream = BytesIO()
    with _themed(theme):
        _drawn(chart, theme).savefig(stream, format="svg", metadata=_SVG)
    return stream.getvalue()


def write(chart: Chart, folder: Path, name: str) -> list[Path]:
    """SVG for pages and PNG for everything else, light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for theme in THEMES:
        with _themed(theme):
            figure = _drawn(chart, theme)
            # Laid out once for both files; it is the slowest part.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            paths = [folder / f"{name}{theme.suffix}.{kind}" for kind in ("svg", "png")]
            figure.savefig(paths[0], metadata=_SVG)
            figure.savefig(paths[1], dpi=_DPI, metadata={"Software": None})
            written += paths
    return written


def write_all(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Every chart by the name of its files."""
    return [path for name, chart in charts.items() for path in write(chart, folder, name)]


_SVG: Mapping[str, None] = {"Date": None, "Creator": None}


@contextmanager
def _themed(theme: Theme) -> Generator[None]:
    """matplotlib's settings while a figure is drawn and saved."""
    matplotlib: Any = import_module("matplotlib")
    page, ink, muted = (theme.named[name] for name in ("page", "ink", "muted"))
    colors = {
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), page),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), ink),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), muted),
        "grid.color": theme.named["faint"],
    }
    with (
        as_file(files("outrider_lab.bench") / "templates" / "figures.mplstyle") as style,
        matplotlib.rc_context(colors, str(style)),
        warnings.catch_warnings(),
    ):
        # A letter that the font lacks is a box.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _drawn(chart: Chart, theme: Theme) -> Any:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(WIDTH_INCHES, chart.height), layout="constrained")
    figure.suptitle(chart.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    columns = max(map(len, chart.panels))
    grid = figure.subplots(
        len(chart.panels),
        columns,
        sharex=chart.share == "x",
        sharey=chart.share == "y",
        squeeze=False,
        gridspec_kw={"height_ratios": chart.heights or None},
    )
    rows = zip(grid, chart.panels, strict=True)
    placed = [pair for places, panels in rows for pair in zip_longest(places, panels)]
    for axes, panel in placed:
        if panel is None:
            axes.set_visible(False)
        else:
            _panel(axes, panel, theme)
    # Panels may share an axis, so its limits are set once they have all been drawn.
    for axes, panel in placed:
        if panel is not None:
            _axis(axes, "x", panel.x)
        if isinstance(panel, Lines | Bars):
            _axis(axes, "y", panel.y)
    _legend(figure)
    if chart.foot:
        color = theme.named["muted"]
        figure.supxlabel(chart.foot, fontsize=7.5, color=color, x=0.01, ha="left")
    return figure


def _legend(figure: Any) -> None:
    """Every name once, right of all panels."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    if named:
        figure.legend(named.values(), named.keys(), loc="outside right upper")


def _panel(axes: Any, panel: Panel, theme: Theme) -> None:
    axes.set_title(panel.title)
    match panel:
        case Lines():
            _lines(axes, panel, theme)
        case Bars():
            _bars(axes, panel, theme)
        case Dots():
            _dots(axes, panel, theme)
        case Squares():
            _squares(axes, panel, theme)
        case TimelineChart():
            _timeline(axes, panel, theme)


def _lines(axes: Any, panel: Lines, theme: Theme) -> None:
    if panel.band:
        places, lows, highs = zip(*panel.band, strict=True)
        axes.fill_between(places, lows, highs, color=theme.named["faint"], zorder=0)
    _levels(axes, panel.levels, theme)
    for line in panel.lines:
        if line.points:
            _line(axes, line, theme)
    if panel.x.scale != "linear":
        axes.grid(visible=True, axis="both")


def _line(axes: Any, line: Line, theme: Theme) -> None:
    color = theme.color(line.color)
    xs, ys = zip(*line.points, strict=True)
    look = {
        "color": color,
        "label": line.name or None,
        "linewidth": line.width,
        "linestyle": {"": "none", "--": _DASHED}.get(line.dash, line.dash),
        "marker": line.mark or None,
        "markerfacecolor": theme.named["page"] if line.hollow else color,
        "zorder": 1 if line.width > 3 else 2,
    }
    if line.steps:
        axes.step(xs, ys, where="post", **look)
    elif line.spans:
        below = [y - low for y, (low, _) in zip(ys, line.spans, strict=True)]
        above = [high - y for y, (_, high) in zip(ys, line.spans, strict=True)]
        axes.errorbar(xs, ys, yerr=[below, above], elinewidth=1.2, **look)
    else:
        axes.plot(xs, ys, **look)
    for place, text in zip(line.points, line.texts, strict=False):
        words = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
        axes.annotate(text, place, color=color, **words)


def _bars(axes: Any, panel: Bars, theme: Theme) -> None:
    bottoms = [0.0] * max((len(heights) for _, _, heights in panel.parts), default=0)
    for name, color, heights in panel.parts:
        look = {"color": theme.color(color), "label": name or None, "width": 0.75}
        axes.bar(range(len(heights)), heights, bottom=bottoms, **look)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    _levels(axes, panel.levels, theme)


def _dots(axes: Any, panel: Dots, theme: Theme) -> None:
    size = 7 if any("\n" in name for name in panel.names) else 9
    axes.axvline(1, color=theme.named["muted"], linewidth=1)
    for place, dot in enumerate(panel.dots):
        if dot is None:
            continue
        color = theme.color(dot.color)
        axes.plot(dot.span, [place, place], color=color, linewidth=2)
        axes.plot([dot.value], [place], color=color, marker="o")
        beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7.5}
        if dot.text:
            axes.text(1.02, place, dot.text, **beside)
    axes.set_yticks(range(len(panel.names)), panel.names, fontsize=size)
    axes.set_ylim(len(panel.names) - 0.5, -0.5)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _squares(axes: Any, panel: Squares, theme: Theme) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    diverging = LinearSegmentedColormap.from_list("gain", theme.diverging)
    words = {"ha": "center", "fontsize": 8}
    for row, squares in enumerate(panel.squares):
        for column, square in enumerate(squares):
            if square.value is None:
                axes.text(column, row, square.text, va="center", **words)
                continue
            color = diverging((square.value + 1) / 2) if panel.diverging else None
            color = theme.color(float(square.value)) if color is None else color
            ink = readable_on(color)
            axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, color=color))
            va = "bottom" if square.small else "center"
            axes.text(column, row, square.text, color=ink, va=va, **words)
            if square.small:
                axes.text(column, row, square.small, color=ink, va="top", **words)
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.set_xlim(-0.5, max(len(panel.columns), 1) - 0.5)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.grid(visible=False)


def _timeline(axes: Any, panel: TimelineChart, theme: Theme) -> None:
    for job in panel.jobs:
        edge = {"edgecolor": theme.named["page"], "linewidth": 0.4} if job.edged else {}
        began, ended = job.span
        axes.broken_barh(
            [(began, ended - began)],
            (job.row - 0.34, 0.68),
            facecolor=theme.color(job.color),
            label=job.name or None,
            **edge,
        )
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _levels(axes: Any, levels: Iterable[tuple[str, float]], theme: Theme) -> None:
    for name, height in levels:
        look = {"color": theme.named["muted"], "linestyle": _DASHED, "linewidth": 1.2}
        axes.axhline(height, label=name or None, **look)


def _axis(axes: Any, which: str, axis: Axis) -> None:
    own = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}label")(axis.label)
    limit = getattr(axes, f"set_{which}lim")
    if axis.scale != "linear":
        getattr(axes, f"set_{which}scale")("log")
    if isinstance(axis.ticks, Mapping):
        _ticks(own, axis.ticks)
    elif axis.ticks:
        size = 6.5 if len(axis.ticks) > _MANY else 9
        own.set_ticks(range(len(axis.ticks)), axis.ticks, fontsize=size)
        limit(-0.5, len(axis.ticks) - 0.5)
    elif axis.scale == "ratio" and axis.low and axis.high:
        _ticks(own, _round(axis.low, axis.high))
    elif axis.scale == "log":
        own.set_major_formatter("{x:g}")
        own.set_minor_formatter("")
    limit(axis.low, axis.high)


def _round(low: float, high: float) -> Mapping[float, str]:
    """Short round numbers from `low` to `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**n for n in decades for step in (_TICKS if high / low < 30 else (1, 3))]
    return {tick: f"{tick:g}" for tick in found if low <= tick <= high}


def _ticks(axis: Any, ticks: Mapping[float, str]) -> None:
    """These and nothing between."""
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(list(ticks), list(ticks.values()))


def readable_on(color: Sequence[float]) -> str:
    """Black or white, whichever stands out from an RGB colour (relative luminance, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"
