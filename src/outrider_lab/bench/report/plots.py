"""Charts that parts of several kinds have: ratios, frontiers, predictions beside measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.charts import (
    Axis,
    Chart,
    Color,
    Dots,
    Line,
    Lines,
    Point,
    Span,
    dot_of,
    span_of,
)
from outrider_lab.bench.report.parts import Claim, Figure
from outrider_lab.planner.advise import RatePoint as Setting
from outrider_lab.planner.advise import frontier

BASELINES = ("off", "plain")
# More rows than this would be a page of their own.
MAX_ROWS = 24
# Where ratios lie further apart than this, their axis has equal steps for equal ratios.
_FAR = 4.0
# How far from the diagonal the band of the scatter reaches.
_BAND = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPair:
    """One cell; `low` and `high` bound what was measured, where there is an interval."""

    series: str
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def span(self) -> Span:
        return min(self.low or self.measured, self.measured), max(
            self.high or self.measured, self.measured
        )


def claims_chart(claims: Sequence[Claim], title: str, label: str, foot: str) -> Chart:
    """A dot a claim. Of too many the least and the most favourable are shown, so that a cut figure
    shows no better half."""
    shown = list(claims)
    if len(claims) > MAX_ROWS:
        order = sorted(claims, key=lambda claim: claim.ratio.value)
        shown = [*order[: MAX_ROWS // 2], *order[-MAX_ROWS // 2 :]]
        foot = f"{foot}; {len(claims) - len(shown)} more are in the table"
    ends = [end for claim in shown for end in span_of(claim.ratio)]
    low, high = min([0.9, *ends]), max([1.1, *ends])
    names = [claim.where.replace(" over ", "\nover ") for claim in shown]
    far = high / low > _FAR
    dots = Dots(
        names=names,
        dots=[dot_of(name, claim.ratio) for name, claim in zip(names, shown, strict=True)],
        x=Axis(label=label, low=0.95 * low, high=1.05 * high, scale="log")
        if far
        else Axis(label=label),
    )
    return Chart(
        title=title,
        panels=[[dots]],
        foot=f"{foot}; lines are 95 % intervals, grey: it may be chance",
        height=1.1 + 0.3 * len(shown),
    )


def by_level(series: Mapping[str, Mapping[int, Ratio]], title: str, label: str, foot: str) -> Chart:
    """A line with intervals for each series over levels that stand at equal distances."""
    levels = sorted({level for found in series.values() for level in found})
    lines = [
        curve(
            name,
            [
                (levels.index(level) + 0.08 * (number - (len(series) - 1) / 2), ratio.value)
                for level, ratio in found.items()
            ],
            number,
            spans=[span_of(ratio) for ratio in found.values()],
        )
        for number, (name, found) in enumerate(series.items())
    ]
    panel = Lines(
        lines=lines,
        levels=[("plain decoding", 1)],
        x=Axis(label=label, ticks=[*map(str, levels)]),
        y=Axis(label="times plain decoding", low=0),
    )
    return Chart(title=title, panels=[[panel]], foot=f"{foot}; bars are 95 % intervals")


def pareto(series: Mapping[str, Sequence[Setting]], foot: str) -> Chart:
    """Total throughput against the speed of one user: what no other setting beats in both. A
    setting's name is its batch or level; plain decoding is grey."""
    best = frontier(one for own in series.values() for one in own)
    drafting = [name for name in series if name not in BASELINES]
    lines = [
        Line(points=[(one.each, one.total) for one in best], color="faint", width=6, steps=True)
    ]
    for number, (name, own) in enumerate(series.items()):
        plain = name in BASELINES
        color: Color = "muted" if plain else drafting.index(name)
        between = [""] * (len(own) - 2)
        lines.append(
            Line(
                name="plain decoding" if plain else name,
                points=[(one.each, one.total) for one in own],
                texts=[own[0].name, *between, own[-1].name] if len(own) > 1 else [own[0].name],
                color=color,
                mark=number,
            )
        )
    panel = Lines(
        lines=lines,
        x=Axis(label="tokens a second of one user", low=0),
        y=Axis(label="tokens a second of all", low=0),
    )
    return Chart(
        title="Total throughput against the speed of one user",
        panels=[[panel]],
        foot=f"{foot}; the broad line is the frontier, numbers are requests at once, at both ends",
        height=4.2,
    )


def scatter_figure(
    name: str,
    pairs: Sequence[PredictedPair],
    title: str,
    what: str,
    *,
    foot: str,
    plain: bool = False,
) -> Figure:
    """Predicted against measured: a dot a cell; both axes have one scale. With `plain` a value of 1
    is plain decoding."""
    ends = [end for pair in pairs for end in pair.span] + [pair.predicted for pair in pairs]
    low, high = 0.85 * min(end for end in ends if end > 0), 1.18 * max(ends)
    far = "log" if high / low > _FAR else "linear"
    lines = [
        Line(points=[(low, low), (high, high)], color="muted", width=1),
        *([Line(points=[(1, low), (1, high)], color="muted", width=1, dash="--")] if plain else []),
    ]
    for number, series in enumerate(dict.fromkeys(pair.series for pair in pairs)):
        own = [pair for pair in pairs if pair.series == series]
        lines.append(
            Line(
                name=series,
                points=[(pair.predicted, pair.measured) for pair in own],
                spans=[pair.span for pair in own] if any(pair.low for pair in own) else [],
                color=number,
                mark=number,
                dash="",
            )
        )
    panel = Lines(
        lines=lines,
        levels=[("plain decoding", 1)] if plain else [],
        band=[(end, end * (1 - _BAND), end * (1 + _BAND)) for end in (low, high)],
        x=Axis(label=f"predicted, {what}", low=low, high=high, scale=far),
        y=Axis(label=f"measured, {what}", low=low, high=high, scale=far),
    )
    chart = Chart(
        title=title, panels=[[panel]], foot=f"on the line both are equal; {foot}", height=5.2
    )
    words = (
        f"{title}: measured over predicted {what}, a dot a cell, beside the line on which both are "
        "equal. Numbers are in the table below."
    )
    return Figure(name=name, chart=chart, words=words)


def said(pairs: Sequence[PredictedPair], what: str) -> list[str]:
    """How far predictions were off."""
    errors = sorted(abs(pair.error) for pair in pairs)
    worst = max(pairs, key=lambda pair: abs(pair.error))
    place = min(len(errors) - 1, round(0.95 * (len(errors) - 1)))
    return [
        f"Predicted {what} are off by {100 * statistics.median(errors):.1f} % in the median of "
        f"{len(pairs)} cells and by {100 * errors[place]:.1f} % at percentile 95.",
        f"The largest miss is {100 * worst.error:+.0f} %, at {worst.series}.",
    ]


def curve(name: str, points: Sequence[Point], number: int, *, spans: Sequence[Span] = ()) -> Line:
    """A marked line of the hue `number`."""
    return Line(name=name, points=points, spans=spans, color=number, mark=number)
