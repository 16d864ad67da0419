"""The figures of a sweep: one for each axis, drawn from its results folder and nothing else.

Left is the speed-up over plain decoding, which is the line at 1; right the share of drafts kept. A
line joins cells that differ in this axis alone. Few lines are named at their ends; many are faint,
and their mean is drawn over them, geometric for ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.figure_panels import caption, label_ends
from outrider.bench.figure_style import THEMES, Theme, new_figure, save, themed
from outrider.bench.store import Plain
from outrider.bench.studies.sweep_record import ResultsFolder
from outrider.bench.studies.sweep_report import shown
from outrider.bench.studies.sweep_summary import Point, axes_in, points

_MOST_NAMED = 6
Reading = tuple[float, float | None, float | None]


@dataclass(frozen=True, slots=True)
class _Panel:
    """`read` gives a cell's value and its interval, `mean` that of several."""

    label: str
    read: Callable[[Point], Reading | None]
    mean: Callable[[Sequence[float]], float] = statistics.fmean
    baseline: float | None = None


def _speedup(point: Point) -> Reading | None:
    ratio = point.ratio
    return None if ratio is None else (ratio.value, ratio.low, ratio.high)


def _accepted(point: Point) -> Reading | None:
    spread = point.cell.acceptance
    return None if spread is None else (100 * spread.mean, None, None)


def _verify(point: Point) -> Reading | None:
    spread = point.cell.verify_ms
    return None if spread is None else (spread.mean, None, None)


def _throughput(point: Point) -> Reading | None:
    spread = point.cell.tokens_per_second
    return None if spread is None else (spread.mean, None, None)


_DRAFTING = (
    _Panel("speed-up over plain decoding", _speedup, mean=statistics.geometric_mean, baseline=1.0),
    _Panel("accepted, % of drafted", _accepted),
)
# What grows with K, beside what it brings.
_VERIFY = _Panel("milliseconds of a verifying pass", _verify)
_PLAIN = (_Panel("tokens a second", _throughput),)


def draw_all(folder: ResultsFolder) -> list[Path]:
    """Write a figure for each axis with several values, light and dark, as SVG and PNG."""
    written: list[Path] = []
    found = points(folder)
    drafting = [point for point in found if not point.is_plain]
    for axis, values in axes_in(folder).items():
        if len(values) < 2:
            continue
        panels = _DRAFTING if drafting else _PLAIN
        if axis == "k":
            panels = (*panels, _VERIFY)
        for theme in THEMES:
            with themed(theme):
                figure = _by_axis(drafting or found, axis, values, (panels, theme))
                caption(figure, _caption(folder), theme)
                written += save(figure, folder.path / "figures", f"by_{axis}", theme)
    return written


def _by_axis(
    found: Sequence[Point], axis: str, values: Sequence[Plain], how: tuple[Sequence[_Panel], Theme]
) -> Any:
    panels, theme = how
    figure = new_figure(3.8, f"By {axis}")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    lines = _lines(found, axis)
    for axes, panel in zip(grid, panels, strict=True):
        axes.set_xticks(range(len(values)), [shown(value) for value in values])
        longest = max(map(len, lines), default=0) if len(lines) <= _MOST_NAMED else len("mean of")
        room = 0.4 + 0.045 * (longest + 3) * len(values) if len(lines) > 1 else 0.4
        axes.set_xlim(-0.4, len(values) - 1 + room)
        axes.set_xlabel(axis)
        axes.set_ylabel(panel.label)
        if panel.baseline is not None:
            axes.axhline(panel.baseline, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
            axes.set_title("- - plain decoding", loc="right", color=theme.muted, fontsize=8)
        _draw(axes, panel, _read(lines, panel, values), theme)
        axes.set_ylim(bottom=0)
    return figure


def _lines(found: Sequence[Point], axis: str) -> dict[str, dict[Plain, Point]]:
    """Cells by the value of `axis`, for each combination of all the others."""
    lines: dict[str, dict[Plain, Point]] = {}
    names = [name for name in found[0].values if name != axis]
    several = [name for name in names if len({point.values[name] for point in found}) > 1]
    for point in found:
        name = ", ".join(shown(point.values[other]) for other in several)
        lines.setdefault(name, {})[point.values[axis]] = point
    return lines


def _read(
    lines: Mapping[str, Mapping[Plain, Point]], panel: _Panel, values: Sequence[Plain]
) -> dict[str, list[tuple[int, Reading]]]:
    """Places along the axis and what is there; lines without anything are left out."""
    read: dict[str, list[tuple[int, Reading]]] = {}
    for name, line in lines.items():
        places = [
            (place, reading)
            for place, value in enumerate(values)
            if value in line and (reading := panel.read(line[value])) is not None
        ]
        if places:
            read[name] = places
    return read


def _draw(
    axes: Any, panel: _Panel, read: Mapping[str, Sequence[tuple[int, Reading]]], theme: Theme
) -> None:
    many = len(read) > _MOST_NAMED
    ends: list[tuple[str, float, str]] = []
    for number, (name, line) in enumerate(read.items()):
        color = theme.muted if many else theme.hues[number % len(theme.hues)]
        # Beside each other, so that intervals do not hide one another.
        aside = 0.0 if many else 0.06 * (number - (len(read) - 1) / 2)
        places, heights = [x + aside for x, _ in line], [r[0] for _, r in line]
        axes.plot(places, heights, color=color, linewidth=0.7 if many else 1.8)
        if not many:
            _marks(axes, line, (color, "os^Dvp"[number % 6], aside))
            ends.append((name, heights[-1], color))
    if many:
        by_place: dict[int, list[float]] = {}
        for line in read.values():
            for place, (value, _, _) in line:
                by_place.setdefault(place, []).append(value)
        mean = [(place, panel.mean(by_place[place])) for place in sorted(by_place)]
        color = theme.hues[0]
        axes.plot([x for x, _ in mean], [y for _, y in mean], color=color, marker="o")
        ends.append((f"mean of {len(read)}", mean[-1][1], color))
    if len(read) > 1 and ends:
        heights = [reading[0] for line in read.values() for _, reading in line]
        heights.append(panel.baseline or 0.0)
        last = max(line[-1][0] for line in read.values())
        label_ends(axes, last + 0.25, ends, gap=0.07 * max(heights))


def _marks(axes: Any, line: Sequence[tuple[int, Reading]], look: tuple[str, str, float]) -> None:
    """A mark for each cell, with its interval where there is one; `look` is a colour, a kind of
    mark and how far aside it stands."""
    color, marker, aside = look
    for place, (value, low, high) in line:
        below = 0.0 if low is None else max(value - low, 0.0)
        above = 0.0 if high is None else max(high - value, 0.0)
        axes.errorbar([place + aside], [value], yerr=[[below], [above]], color=color, marker=marker)


def _caption(folder: ResultsFolder) -> str:
    run = folder.runs[-1]
    config = folder.samples[-1].config
    machine = run["machine"]["gpu"] or run["machine"]["cpu"]
    pairs = ", ".join(dict.fromkeys(str(one["pair"]) for one in folder.runs))
    return f"{pairs}, {config.max_tokens} tokens, {machine}; bars are 95 % intervals"
