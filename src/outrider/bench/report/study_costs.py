"""Figures of what a cost study's rounds and passes take: parts, windows, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import Theme, new_figure
from outrider.bench.gemm.record import Ceilings, Cell, ProductRow, WindowRow

_MAX_PANELS = 3
# A part of a round and the stage whose colour it has.
_PARTS: Mapping[str, str] = {
    "draft_ms": "draft",
    "verify_ms": "target",
    "accept_ms": "accept",
    "rest_ms": "other",
}
_WORDS = {"draft": "draft", "target": "verify", "accept": "accept", "other": "rest"}


def breakdown(cells: Sequence[Cell], foot: str, theme: Theme) -> Any:
    """Stacked bars: plain decoding, then SD and SSD at each K; a panel an acceptance rate."""
    own = [cell for cell in cells if cell.study == "alpha"]
    alphas = sorted({cell.alpha for cell in own if cell.method != "ar"})[-_MAX_PANELS:]
    figure = new_figure(3.8, "Milliseconds of a round by its parts")
    panels = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
    plain = [cell for cell in own if cell.method == "ar"][:1]
    for axes, alpha in zip(panels, alphas, strict=True):
        drafted = [cell for cell in own if cell.method != "ar" and cell.alpha == alpha]
        bars = [*plain, *sorted(drafted, key=lambda cell: (cell.k, cell.method))]
        bottoms = np.zeros(len(bars))
        for part, stage in _PARTS.items():
            heights = np.asarray([getattr(cell, part) for cell in bars])
            axes.bar(
                range(len(bars)),
                heights,
                bottom=bottoms,
                color=theme.stages[stage],
                width=0.75,
                label=_WORDS[stage],
            )
            bottoms = bottoms + heights
        if plain:
            axes.axhline(bottoms[0], color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
        axes.set_xticks(range(len(bars)), [_bar_name(cell) for cell in bars], fontsize=7)
        axes.set_title(f"alpha = {alpha:g}", loc="left")
    panels[0].set_ylabel("milliseconds a round")
    panels[0].legend(frameon=False, fontsize=8)
    caption(figure, f"{foot}; dashed: a plain pass; a round emits several tokens", theme)
    return figure


def windows(rows: Sequence[WindowRow], foot: str, theme: Theme) -> Any:
    """How many draft passes over so many branches fit beside a verification of K + 1 rows."""
    figure = new_figure(3.8, "Draft passes that fit beside a verification")
    axes = figure.subplots()
    ks = sorted({row.k for row in rows})
    for number, branches in enumerate(sorted({row.branches for row in rows})):
        color = theme.hues[number % len(theme.hues)]
        own = sorted((r for r in rows if r.branches == branches), key=lambda row: row.k)
        places = [ks.index(row.k) for row in own]
        label = f"{branches} {'branch' if branches == 1 else 'branches'}"
        axes.errorbar(
            places,
            [row.num_passes for row in own],
            yerr=[
                [row.num_passes - _fitting(row, row.pass_most) for row in own],
                [_fitting(row, row.pass_least) - row.num_passes for row in own],
            ],
            color=color,
            label=label,
        )
        for place, row in zip(places, own, strict=True):
            face = color if row.fits else theme.page
            axes.plot([place], [row.num_passes], marker="o", color=color, markerfacecolor=face)
    axes.plot(range(len(ks)), ks, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.text(len(ks) - 1, ks[-1], "needed: K ", color=theme.muted, fontsize=8, ha="right")
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set_xlim(-0.4, len(ks) - 0.6)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K")
    axes.set_ylabel("draft passes a verification")
    axes.legend(frameon=False, fontsize=8)
    bars = "; bars: all repeats" if any(row.pass_least is not None for row in rows) else ""
    caption(figure, f"{foot}; filled: a trunk and K passes over all branches fit{bars}", theme)
    return figure


def _fitting(row: WindowRow, seconds: float | None) -> float:
    """Passes of so many seconds that fit; as many as the row says if they are unknown."""
    return row.verify_seconds / seconds if seconds else row.num_passes


def roofline(products: Sequence[ProductRow], ceilings: Ceilings, foot: str, theme: Theme) -> Any:
    """Each product below the lesser of memory's and arithmetic's ceiling."""
    figure = new_figure(4.2, "Matrix products against the roofline")
    axes = figure.subplots()
    reached = [row.intensity for row in products if row.intensity > 0]
    low, high = min([*reached, ceilings.ridge]) / 2, max([*reached, ceilings.ridge]) * 2
    line = np.geomspace(low, high, 200)
    roof = np.minimum(line * ceilings.gigabytes_per_second, ceilings.gigaflops_per_second)
    axes.plot(line, roof, color=theme.muted, linewidth=1.6)
    axes.text(
        low,
        low * ceilings.gigabytes_per_second,
        f"  {ceilings.gigabytes_per_second:.1f} GB/s from memory",
        color=theme.muted,
        fontsize=8,
        va="top",
    )
    axes.text(
        high,
        ceilings.gigaflops_per_second,
        f"{ceilings.gigaflops_per_second:,.0f} GFLOP/s",
        color=theme.muted,
        fontsize=8,
        va="bottom",
        ha="right",
    )
    for number, shape in enumerate(dict.fromkeys(row.shape for row in products)):
        own = [row for row in products if row.shape == shape and row.intensity > 0]
        axes.plot(
            [row.intensity for row in own],
            [row.gigaflops_per_second for row in own],
            linestyle="none",
            marker="os^Dvp"[number % 6],
            color=theme.hues[number % len(theme.hues)],
            label=shape,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(visible=True, axis="both")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("gigaflops a second")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    caption(figure, f"{foot}; grey: what the measured ceilings allow", theme)
    return figure


def _bar_name(cell: Cell) -> str:
    return "plain" if cell.method == "ar" else f"{cell.method.upper()}\nK={cell.k}"
