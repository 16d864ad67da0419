"""A dot for each ratio with its 95 % interval, beside a line at 1: what gains, and what loses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import Theme, new_figure
from outrider.bench.frame import Ratio
from outrider.bench.report.values import Claim

_LINE_INCHES, _FRAME_INCHES = 0.3, 1.1
# More rows than this would be a page of their own.
MAX_ROWS = 24
# Where ratios lie further apart than this, their axis doubles in equal steps.
_FAR = 4.0
_TICKS = (1, 1.5, 2, 3, 5, 7)


def ratios(claims: Sequence[Claim], words: Mapping[str, str], theme: Theme) -> Any:
    """From top to bottom in the order of `claims`. `words` has the title, the axis's `label` and
    the `foot`."""
    shown = list(claims)[:MAX_ROWS]
    figure = new_figure(_FRAME_INCHES + _LINE_INCHES * len(shown), words["title"])
    axes = figure.subplots()
    colors = {"gain": theme.diverging[2], "loss": theme.diverging[0]}
    axes.axvline(1, color=theme.muted, linewidth=1)
    ends = [end for claim in shown for end in _span(claim.ratio)]
    low, high = min([0.9, *ends]), max([1.1, *ends])
    if high / low > _FAR:
        axes.set_xscale("log")
        axes.set_xlim(0.95 * low, 1.05 * high)
        name_ticks(axes.xaxis, low, high)
    for place, claim in enumerate(shown):
        color = colors.get(claim.verdict, theme.muted)
        axes.plot(_span(claim.ratio), [place, place], color=color, linewidth=2)
        axes.plot([claim.ratio.value], [place], color=color, marker="o")
    names = [claim.where.replace(" over ", "\nover ") for claim in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(words["label"])
    left_out = len(claims) - len(shown)
    foot = f"{words['foot']}; {left_out} more are in the table" if left_out else words["foot"]
    caption(figure, f"{foot}; lines are 95 % intervals, grey: it may be chance", theme)
    return figure


def by_level(
    claims: Mapping[str, Mapping[int, Ratio]], words: Mapping[str, str], theme: Theme
) -> Any:
    """A line with intervals for each series over levels that stand at equal distances."""
    figure = new_figure(3.8, words["title"])
    axes = figure.subplots()
    levels = sorted({level for found in claims.values() for level in found})
    axes.axhline(1, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.text(-0.35, 1, words["baseline"], color=theme.muted, fontsize=8, va="bottom")
    for number, (name, found) in enumerate(claims.items()):
        shift = 0.08 * (number - (len(claims) - 1) / 2)
        places = [levels.index(level) + shift for level in found]
        values = [ratio.value for ratio in found.values()]
        axes.errorbar(
            places,
            values,
            yerr=[
                [ratio.value - _span(ratio)[0] for ratio in found.values()],
                [_span(ratio)[1] - ratio.value for ratio in found.values()],
            ],
            color=theme.hues[number % len(theme.hues)],
            marker="os^Dvp"[number % 6],
            label=name,
        )
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlim(-0.4, len(levels) - 0.6)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(words["axis"])
    axes.set_ylabel(words["label"])
    axes.legend(frameon=False, fontsize=8, ncols=max(len(claims), 1), loc="lower right")
    caption(figure, f"{words['foot']}; bars are 95 % intervals", theme)
    return figure


def _span(ratio: Ratio) -> tuple[float, float]:
    """The ends of its interval; of a ratio without one, the ratio. An interval that does not hold
    its ratio is stretched to it."""
    value = ratio.value
    low = value if ratio.low is None else ratio.low
    high = value if ratio.high is None else ratio.high
    return min(low, value), max(high, value)


def name_ticks(axis: Any, low: float, high: float) -> None:
    """Of an axis in equal ratios: short round numbers from `low` to `high`, nothing between."""
    from matplotlib.ticker import NullLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**n for n in decades for step in (_TICKS if high / low < 30 else (1, 3))]
    ticks = [tick for tick in found if low <= tick <= high]
    axis.set_minor_locator(NullLocator())
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
