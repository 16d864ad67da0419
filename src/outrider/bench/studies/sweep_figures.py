"""The figures of a sweep: one for each axis, drawn from its results folder and nothing else.

Left is the speed-up over plain decoding, which is the line at 1; right the share of drafts kept. A
line joins cells that differ in this axis alone. Few lines are named; many are faint, and their mean
is drawn over them, geometric for ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.charts import MARKS, Axis, Chart, Line, Lines, Panel, span_of
from outrider.bench.drawing import write_all
from outrider.bench.frame import Ratio, Spread
from outrider.bench.store import Plain
from outrider.bench.studies.sweep_record import ResultsFolder
from outrider.bench.studies.sweep_report import shown
from outrider.bench.studies.sweep_summary import Point, axes_in, points

_MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class _Panel:
    """`read` gives a cell's value, with its interval or without, `mean` that of several."""

    label: str
    read: Callable[[Point], Ratio | Spread | None]
    mean: Callable[[Sequence[float]], float] = statistics.fmean
    scale: float = 1.0
    baseline: float | None = None


_DRAFTING = (
    _Panel(
        "speed-up over plain decoding",
        lambda point: point.ratio,
        mean=statistics.geometric_mean,
        baseline=1.0,
    ),
    _Panel("accepted, % of drafted", lambda point: point.cell.acceptance, scale=100),
)
# What grows with K, beside what it brings.
_VERIFY = _Panel("milliseconds of a verifying pass", lambda point: point.cell.verify_ms)
_PLAIN = (_Panel("tokens a second", lambda point: point.cell.tokens_per_second),)


def draw_all(folder: ResultsFolder) -> list[Path]:
    """Write a figure for each axis with several values, light and dark, as SVG and PNG."""
    return write_all(charts(folder), folder.path / "figures")


def charts(folder: ResultsFolder) -> dict[str, Chart]:
    """By the name of their files."""
    found = points(folder)
    drafting = [point for point in found if not point.is_plain]
    panels = _DRAFTING if drafting else _PLAIN
    return {
        f"by_{axis}": _chart(
            drafting or found,
            (axis, values),
            (*panels, _VERIFY) if axis == "k" else panels,
            _caption(folder),
        )
        for axis, values in axes_in(folder).items()
        if len(values) > 1
    }


def _chart(
    found: Sequence[Point],
    by: tuple[str, Sequence[Plain]],
    panels: Sequence[_Panel],
    caption: str,
) -> Chart:
    axis, values = by
    own = [_panel(_lines(found, axis), panel, axis, values) for panel in panels]
    return Chart(title=f"By {axis}", panels=[own], foot=caption)


def _panel(
    lines: Mapping[str, Mapping[Plain, Point]],
    panel: _Panel,
    axis: str,
    values: Sequence[Plain],
) -> Panel:
    return Lines(
        lines=list(_drawn(lines, panel, values)),
        levels=[] if panel.baseline is None else [("plain decoding", panel.baseline)],
        x=Axis(label=axis, ticks=[shown(value) for value in values]),
        y=Axis(label=panel.label, low=0),
    )


def _lines(found: Sequence[Point], axis: str) -> dict[str, dict[Plain, Point]]:
    """Cells by the value of `axis`, for each combination of all the others."""
    lines: dict[str, dict[Plain, Point]] = {}
    names = [name for name in found[0].values if name != axis]
    several = [name for name in names if len({point.values[name] for point in found}) > 1]
    for point in found:
        name = ", ".join(shown(point.values[other]) for other in several)
        lines.setdefault(name, {})[point.values[axis]] = point
    return lines


def _drawn(
    lines: Mapping[str, Mapping[Plain, Point]], panel: _Panel, values: Sequence[Plain]
) -> Iterator[Line]:
    """Lines without anything are left out."""
    read = {
        name: own
        for name, line in lines.items()
        if (own := {i: v for i, x in enumerate(values) if x in line and (v := panel.read(line[x]))})
    }
    many = len(read) > _MOST_NAMED
    by_place: dict[int, list[float]] = {}
    for number, (name, own) in enumerate(read.items()):
        # Beside each other, so that intervals do not hide one another.
        aside = 0.0 if many else 0.06 * (number - (len(read) - 1) / 2)
        for place, value in own.items():
            by_place.setdefault(place, []).append(panel.scale * _value(value))
        yield Line(
            name="" if many or len(read) == 1 else name,
            points=[(x + aside, panel.scale * _value(value)) for x, value in own.items()],
            spans=[] if many else [_span(value, panel.scale) for value in own.values()],
            color="muted" if many else number,
            mark="" if many else MARKS[number % len(MARKS)],
            width=0.7 if many else 1.8,
        )
    if many:
        mean = [(place, panel.mean(by_place[place])) for place in sorted(by_place)]
        yield Line(name=f"mean of {len(read)}", points=mean, color=0, mark="o")


def _value(found: Ratio | Spread) -> float:
    return found.value if isinstance(found, Ratio) else found.mean


def _span(found: Ratio | Spread, scale: float) -> tuple[float, float]:
    if isinstance(found, Ratio):
        return span_of(found)
    return scale * found.mean, scale * found.mean


def _caption(folder: ResultsFolder) -> str:
    run = folder.runs[-1]
    config = folder.samples[-1].config
    machine = run["machine"]["gpu"] or run["machine"]["cpu"]
    pairs = ", ".join(dict.fromkeys(str(one["pair"]) for one in folder.runs))
    return f"{pairs}, {config.max_tokens} tokens, {machine}; bars are 95 % intervals"
