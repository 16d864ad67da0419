"""Predicted against measured: a dot a cell, beside the line on which both are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import Theme, new_figure
from outrider.bench.report.figure_ratios import name_ticks
from outrider.bench.report.values import Figure

# How far from the diagonal the band of the scatter reaches.
_BAND = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One cell; `low` and `high` bound what was measured, where there is an interval."""

    series: str
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def scatter_figure(name: str, pairs: Sequence[Pair], words: Mapping[str, str]) -> Figure:
    return Figure(
        name=name,
        title=words["title"],
        alt=f"{words['title']}: measured over predicted {words['axis']}, a dot a cell, beside the "
        "line on which both are equal. Numbers are in the table below.",
        draw=partial(scatter, pairs, words),
    )


def scatter(pairs: Sequence[Pair], words: Mapping[str, str], theme: Theme) -> Any:
    """Equal is the diagonal; both axes have one scale."""
    figure = new_figure(5.2, words["title"])
    axes = figure.subplots()
    values = [v for p in pairs for v in (p.predicted, p.measured, p.low or p.measured) if v > 0]
    values += [p.high for p in pairs if p.high]
    low, high = 0.85 * min(values), 1.18 * max(values)
    axes.plot([low, high], [low, high], color=theme.muted, linewidth=1)
    axes.fill_between(
        [low, high],
        [low * (1 - _BAND), high * (1 - _BAND)],
        [low * (1 + _BAND), high * (1 + _BAND)],
        color=theme.faint,
        zorder=0,
    )
    for number, series in enumerate(dict.fromkeys(pair.series for pair in pairs)):
        own = [pair for pair in pairs if pair.series == series]
        axes.errorbar(
            [pair.predicted for pair in own],
            [pair.measured for pair in own],
            yerr=[
                [max(p.measured - p.low, 0.0) if p.low else 0.0 for p in own],
                [max(p.high - p.measured, 0.0) if p.high else 0.0 for p in own],
            ],
            linestyle="none",
            color=theme.hues[number % len(theme.hues)],
            marker="os^Dvp"[number % 6],
            elinewidth=1,
            label=series,
        )
    if words.get("baseline"):
        axes.axhline(1, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1)
        axes.axvline(1, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1)
        axes.text(low, 1, words["baseline"], color=theme.muted, fontsize=8, va="bottom")
    if high / low > 4:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            name_ticks(axis, low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.grid(visible=True, axis="both")
    axes.set_xlabel(f"predicted, {words['axis']}")
    axes.set_ylabel(f"measured, {words['axis']}")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    caption(figure, f"on the line both are equal; {words['foot']}", theme)
    return figure
