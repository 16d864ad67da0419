"""Total throughput against the speed of one user: what no other setting beats in both.

The frontier is that of planner/advise.py: no other point is better in one and no worse in the
other. Lines join the settings of one series by growing batch or level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import Theme, new_figure
from outrider.planner.advise import Point, frontier

BASELINES = ("off", "plain")


def pareto(series: Mapping[str, Sequence[Point]], foot: str, theme: Theme) -> Any:
    """A point's name is its batch or level. Plain decoding is grey; the frontier is drawn as steps
    below everything."""
    figure = new_figure(4.2, "Total throughput against the speed of one user")
    axes = figure.subplots()
    best = frontier(point for own in series.values() for point in own)
    if best:
        axes.step(
            [p.each for p in best],
            [p.total for p in best],
            where="post",
            color=theme.faint,
            linewidth=6,
            solid_capstyle="round",
            zorder=0,
        )
    hues = iter(theme.hues * 4)
    for number, (name, own) in enumerate(series.items()):
        color = theme.muted if name in BASELINES else next(hues)
        axes.plot(
            [p.each for p in own],
            [p.total for p in own],
            color=color,
            marker="os^Dvp"[number % 6],
            label="plain decoding" if name in BASELINES else name,
        )
        for point in (own[0], own[-1]):
            axes.annotate(
                point.name,
                (point.each, point.total),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, axis="both")
    axes.set_xlabel("tokens a second of one user")
    axes.set_ylabel("tokens a second of all")
    axes.legend(frameon=False, fontsize=8)
    caption(
        figure,
        f"{foot}; the broad line is the frontier, numbers are requests at once, at both ends",
        theme,
    )
    return figure
