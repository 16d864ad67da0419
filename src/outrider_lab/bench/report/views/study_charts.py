"""The figures of a cost study: speed-ups, parts of a round, windows, and the roofline.

Dots with bars are measured, with 95 % intervals; dashed lines of the same colour are what theory
makes of the same run's times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.charts import Axis, Bars, Chart, Line, Lines, Panel, span_of
from outrider_lab.bench.cost_record import Ceilings, Cell, ProductRow, WindowRow
from outrider_lab.bench.report.plots import curve, pareto
from outrider_lab.planner.advise import RatePoint

NAMES = {"ar": "plain", "sd": "SD", "ssd": "SSD"}
_PLAIN = [("plain decoding", 1.0)]
_BARS = "bars: 95 % intervals; dashed: theory from the run's own times"
# A part of a round, the stage whose colour it has, and its name.
_PARTS = (
    ("draft_ms", "draft", "draft"),
    ("verify_ms", "target", "verify"),
    ("accept_ms", "accept", "accept"),
    ("rest_ms", "other", "rest"),
)
Pick = Callable[[Cell], float | None]


def ratio_of_cell(cell: Cell) -> Ratio:
    return Ratio(cell.speed_up, cell.low, cell.high, cell.num_samples)


def _alpha_and_k(cells: Sequence[Cell], foot: str) -> Chart:
    """A panel an acceptance rate, K at equal distances."""
    own = [cell for cell in cells if cell.method != "ar"]
    alphas = sorted({cell.alpha for cell in own})[-4:]
    ks = sorted({cell.k for cell in own})
    panels = [
        Lines(
            title=f"alpha = {alpha:g}",
            lines=_methods([c for c in own if c.alpha == alpha], lambda c: ks.index(c.k)),
            levels=_PLAIN,
            x=Axis(label="K", ticks=[*map(str, ks)]),
            y=Axis(label="times plain decoding" if alpha == alphas[0] else "", low=0),
        )
        for alpha in alphas
    ]
    title = "Speed-up over plain decoding by K and acceptance rate"
    return Chart(title=title, panels=[panels], foot=f"{foot}; {_BARS}", height=3.6, share="y")


def _hits(cells: Sequence[Cell], foot: str) -> Chart:
    """SSD by the forced share of foreseen verdicts, beside SD of the same study, K and alpha: each
    study has plain decoding of its own visits."""
    ahead = [c for c in cells if c.method == "ssd" and c.p_hit is not None]
    lines: list[Line] = []
    for number, kind in enumerate(sorted({(c.k, c.alpha, c.batch) for c in ahead})):
        k, alpha, batch = kind
        own = [c for c in ahead if (c.k, c.alpha, c.batch) == kind]
        label = f"K={k}, alpha={alpha:g}{f', batch {batch}' if batch > 1 else ''}"
        lines += _measured(f"SSD, {label}", own, lambda c: c.p_hit, number)
        turns = [c for c in cells if c.method == "sd" and (c.k, c.alpha, c.batch) == kind]
        lines += [
            Line(
                name=f"SD, {label}",
                points=[(0.0, turn.speed_up), (1.0, turn.speed_up)],
                color=number,
                width=1.2,
            )
            for turn in turns[:1]
        ]
    panel = Lines(
        lines=lines,
        levels=_PLAIN,
        x=Axis(label="share of verdicts that were foreseen (forced)", low=-0.05, high=1.05),
        y=Axis(label="times plain decoding", low=0),
    )
    title = "SSD and SD over plain decoding, by the share of foreseen verdicts"
    return Chart(title=title, panels=[[panel]], foot=f"{foot}; level lines: SD; {_BARS}")


def _fan_out(cells: Sequence[Cell], foot: str) -> Chart:
    """What drafting for more verdicts brings, and what it takes."""
    own = sorted((cell for cell in cells if cell.method == "ssd"), key=lambda cell: cell.fan_out)
    fans = sorted({cell.fan_out for cell in own})
    kinds = sorted({(cell.k, cell.alpha) for cell in own})
    said: Mapping[str, Pick] = {
        "verdicts foreseen, %": lambda c: None if c.p_hit_seen is None else 100 * c.p_hit_seen,
        "tokens drafted ahead, a round": lambda c: c.num_ahead,
        "drafting ahead / verifying": lambda c: c.ahead_over_verify,
    }
    panels = [
        Lines(
            title=title,
            lines=[
                curve(
                    f"K={k}, alpha={alpha:g}",
                    [
                        (fans.index(cell.fan_out), value)
                        for cell in own
                        if (cell.k, cell.alpha) == (k, alpha) and (value := pick(cell)) is not None
                    ],
                    number,
                )
                for number, (k, alpha) in enumerate(kinds)
            ],
            levels=[("as long as verifying", 1)] if "verifying" in title else [],
            x=Axis(label="fan-out", ticks=[*map(str, fans)]),
            y=Axis(low=0),
        )
        for title, pick in said.items()
    ]
    return Chart(
        title="Drafting ahead by fan-out: hits and work",
        panels=[panels],
        foot=f"{foot}; a fan-out of 0 would be SD",
        height=3.4,
    )


def _breakdown(cells: Sequence[Cell], foot: str) -> Chart:
    """Stacked bars: plain decoding, then SD and SSD at each K; a panel an acceptance rate."""
    alphas = sorted({cell.alpha for cell in cells if cell.method != "ar"})[-3:]
    plain = [cell for cell in cells if cell.method == "ar"][:1]

    def panel(alpha: float) -> Panel:
        drafted = [cell for cell in cells if cell.method != "ar" and cell.alpha == alpha]
        bars = [*plain, *sorted(drafted, key=lambda cell: (cell.k, cell.method))]
        return Bars(
            title=f"alpha = {alpha:g}",
            parts=[(name, color, [getattr(c, part) for c in bars]) for part, color, name in _PARTS],
            levels=[
                ("a plain pass", sum(getattr(one, part) for part, _, _ in _PARTS)) for one in plain
            ],
            x=Axis(ticks=["plain" if c.method == "ar" else _bar_name(c) for c in bars]),
            y=Axis(label="milliseconds a round" if alpha == alphas[0] else "", low=0),
        )

    return Chart(
        title="Milliseconds of a round by its parts",
        panels=[[panel(alpha) for alpha in alphas]],
        foot=f"{foot}; a round emits several tokens",
        share="y",
    )


def _bar_name(cell: Cell) -> str:
    return f"{cell.method.upper()}\n{cell.k}"


def _batch(cells: Sequence[Cell], foot: str) -> Chart:
    """SD and SSD over plain decoding of the same batch."""
    own = [cell for cell in cells if cell.method != "ar"]
    batches = sorted({cell.batch for cell in own})
    panel = Lines(
        lines=_methods(own, lambda cell: batches.index(cell.batch)),
        levels=_PLAIN,
        x=Axis(label="sequences at once", ticks=[*map(str, batches)]),
        y=Axis(label="times plain decoding", low=0),
    )
    title = "Speed-up over plain decoding of the same batch"
    return Chart(title=title, panels=[[panel]], foot=f"{foot}; {_BARS}")


def _pareto(cells: Sequence[Cell], foot: str) -> Chart:
    series: dict[str, list[RatePoint]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.method, cell.batch)):
        point = RatePoint(str(cell.batch), 1000 / cell.token_ms, cell.tokens_per_second)
        series.setdefault(NAMES[cell.method], []).append(point)
    return pareto(series, foot)


# Of each figure the study whose cells it takes, what it shows, and how it is made.
OF_CELLS: Mapping[str, tuple[str, str, Callable[[Sequence[Cell], str], Chart]]] = {
    "fig1_alpha_and_k": (
        "alpha",
        "Speed-up over plain decoding by K, a panel an acceptance rate, SD and SSD with intervals.",
        _alpha_and_k,
    ),
    "fig2_hits": (
        "hits",
        "Speed-up over plain decoding by the share of foreseen verdicts, SSD as points, SD a line.",
        _hits,
    ),
    "fig3_fan_out": (
        "fan_out",
        "Share of foreseen verdicts, and draft tokens made ahead, by fan-out.",
        _fan_out,
    ),
    "fig4_round_breakdown": (
        "alpha",
        "Milliseconds a round of drafting, verifying, accepting and the rest, a bar a method.",
        _breakdown,
    ),
    "fig7_batch": (
        "batch",
        "Speed-up over plain decoding of the same batch, SD and SSD with intervals, by batch.",
        _batch,
    ),
    "fig8_pareto": (
        "batch",
        "Tokens a second of all sequences against those of one, a line a method over batches.",
        _pareto,
    ),
}


def windows(rows: Sequence[WindowRow], foot: str) -> Chart:
    """How many draft passes over so many branches fit beside a verification of K + 1 rows."""
    ks = sorted({row.k for row in rows})
    lines: list[Line] = []
    for number, branches in enumerate(sorted({row.branches for row in rows})):
        own = sorted((row for row in rows if row.branches == branches), key=lambda row: row.k)
        for fits in (True, False):
            here = [(ks.index(row.k), row.num_passes) for row in own if row.fits == fits]
            lines.append(Line(points=here, color=number, mark=0, dash="", hollow=not fits))
        lines.append(
            Line(
                name=f"{branches} {'branch' if branches == 1 else 'branches'}",
                points=[(ks.index(row.k), row.num_passes) for row in own],
                spans=[
                    (_fitting(row, row.pass_most), _fitting(row, row.pass_least)) for row in own
                ],
                color=number,
            )
        )
    needed = Line(name="needed: K", points=list(enumerate(ks)), color="muted", dash="--", width=1.2)
    panel = Lines(
        lines=[needed, *lines],
        x=Axis(label="K", ticks=[*map(str, ks)]),
        y=Axis(label="draft passes a verification", low=0),
    )
    bars = "; bars: all repeats" if any(row.pass_least is not None for row in rows) else ""
    return Chart(
        title="Draft passes that fit beside a verification",
        panels=[[panel]],
        foot=f"{foot}; filled: a trunk and K passes over all branches fit{bars}",
    )


def _fitting(row: WindowRow, seconds: float | None) -> float:
    """Passes of so many seconds that fit; as many as the row says if they are unknown."""
    return row.verify_seconds / seconds if seconds else row.num_passes


def roofline(products: Sequence[ProductRow], ceilings: Ceilings, foot: str) -> Chart:
    """Each product below the lesser of memory's and arithmetic's ceiling."""
    reached = [row for row in products if row.intensity > 0]
    ends = [*(row.intensity for row in reached), ceilings.ridge]
    places = np.geomspace(min(ends) / 2, max(ends) * 2, 200)
    roof = np.minimum(places * ceilings.gigabytes_per_second, ceilings.gigaflops_per_second)
    memory, compute = ceilings.gigabytes_per_second, ceilings.gigaflops_per_second
    ceiling = Line(
        name=f"{memory:.1f} GB/s from memory,\n{compute:,.0f} GFLOP/s",
        points=list(zip(places.tolist(), roof.tolist(), strict=True)),
        color="muted",
    )
    dots = [
        Line(
            name=shape,
            points=[(r.intensity, r.gigaflops_per_second) for r in reached if r.shape == shape],
            color=number,
            mark=number,
            dash="",
        )
        for number, shape in enumerate(dict.fromkeys(row.shape for row in reached))
    ]
    panel = Lines(
        lines=[ceiling, *dots],
        x=Axis(label="operations a byte", scale="log"),
        y=Axis(label="gigaflops a second", scale="log"),
    )
    return Chart(
        title="Matrix products against the roofline",
        panels=[[panel]],
        foot=f"{foot}; grey: what the measured ceilings allow",
        height=4.2,
    )


def _methods(cells: Sequence[Cell], place: Pick) -> list[Line]:
    """SD and SSD, a little apart, so that no bar hides another."""
    found: list[Line] = []
    for number, method in enumerate(("sd", "ssd")):
        own = [cell for cell in cells if cell.method == method]
        shift = 0.06 * (2 * number - 1)

        def moved(cell: Cell, shift: float = shift) -> float:
            return (place(cell) or 0.0) + shift

        found += _measured(method.upper(), own, moved, number)
    return found


def _measured(name: str, cells: Sequence[Cell], place: Pick, number: int) -> list[Line]:
    """What was measured with its intervals, and what theory says."""
    placed = sorted(((place(cell) or 0.0, cell) for cell in cells), key=lambda pair: pair[0])
    points = [(x, cell.speed_up) for x, cell in placed]
    spans = [span_of(ratio_of_cell(cell)) for _, cell in placed]
    theory = [(x, cell.theory.over_verify) for x, cell in placed if cell.theory is not None]
    return [
        curve(name, points, number, spans=spans),
        Line(points=theory, color=number, dash="--", width=1.2),
    ]
