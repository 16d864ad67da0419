"""Figures of where the time goes: latencies, stages, and what verifying K drafts costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.bench.figure_panels import PairData, caption, k_axis, label_ends, panels_of
from outrider.bench.figure_style import Theme, new_figure, spread_out
from outrider.bench.frame import Spread
from outrider.bench.studies.sweep_cells import STAGES

# A distribution is drawn to here; a stall of the machine would squeeze everything else.
_SHOWN_PERCENT = 98


def latency_cdf(pair: PairData, theme: Theme) -> Any:
    title = "Time of a token after the first round (its share of its round)"
    figure, panels = panels_of(pair, theme, title, "tokens at most that slow, %")
    colors = theme.of_k(pair.ks)
    for axes, domain in zip(panels, pair.domains, strict=True):
        times = {k: np.sort(ms) for k in pair.ks if len(ms := pair.token_ms.get((domain, k), ()))}
        for number, (k, ms) in enumerate(times.items()):
            percents = 100 * np.arange(1, len(ms) + 1) / len(ms)
            style = "solid" if k else (0, (4, 2))
            axes.step(ms, percents, where="post", color=colors[k], linestyle=style)
            # Each name at a height of its own, on its curve, so that no two meet.
            height = 88 - 76 * number / max(len(times) - 1, 1)
            place = float(np.interp(height, percents, ms))
            axes.text(
                place,
                height,
                f"K={k}" if k else "plain",
                color=colors[k],
                fontsize=8,
                fontweight="bold",
                ha="center",
                va="center",
                bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 1.0},
            )
        longest = [float(np.percentile(ms, _SHOWN_PERCENT)) for ms in times.values()]
        axes.set_xlim(0, 1.05 * max(longest, default=1.0))
        axes.set_ylim(0, 100)
        axes.set_xlabel("milliseconds a token")
    return figure


def time_breakdown(pair: PairData, theme: Theme) -> Any:
    title = "Where the time of a token goes"
    figure, panels = panels_of(pair, theme, title, "milliseconds a token")
    for axes, domain in zip(panels, pair.domains, strict=True):
        k_axis(axes, pair.ks)
        found = [pair.cells[domain].get(k) for k in pair.ks]
        bottoms = [0.0] * len(found)
        for stage in STAGES:
            heights = [cell.stage_ms.get(stage, 0.0) if cell else 0.0 for cell in found]
            axes.bar(
                range(len(found)), heights, bottom=bottoms, color=theme.stages[stage], width=0.7
            )
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    _name_stages(panels[-1], pair, theme)
    return figure


def _name_stages(axes: Any, pair: PairData, theme: Theme) -> None:
    """Beside the last bar, at the height of each part, moved apart where they would touch."""
    cell = pair.cells[pair.domains[-1]].get(pair.ks[-1])
    parts = [cell.stage_ms.get(stage, 0.0) if cell else 0.0 for stage in STAGES]
    middles = [sum(parts[:i]) + parts[i] / 2 for i in range(len(parts))]
    top = axes.get_ylim()[1]
    for stage, y in zip(STAGES, spread_out(middles, 0.07 * top), strict=True):
        color = theme.stages[stage]
        axes.text(len(pair.ks) - 0.55, y, stage, color=color, va="center", fontweight="bold")


def verify_time(pair: PairData, theme: Theme) -> Any:
    """T_verify(K) / T_verify(0): the means of passes over cached text, prompts left out."""
    figure = new_figure(3.6, "A verifying pass against a plain one, by what it verifies")
    axes = figure.subplots()
    ends: list[tuple[str, float, str]] = []
    longest, tallest = 0.0, 1.0
    for number, domain in enumerate(pair.domains):
        color = theme.hues[number % len(theme.hues)]
        points = _verify_points(pair, domain)
        if len(points) < 2:
            continue
        widths, ratios, errors = zip(*points, strict=True)
        axes.errorbar(widths, ratios, yerr=errors, color=color, marker="os^Dvp"[number % 6])
        ends.append((domain, ratios[-1], color))
        longest = max(longest, *widths)
        tallest = max(tallest, *(ratio + error for _, ratio, error in points))
    reach = longest * 1.25 or 1.0
    axes.axhline(1, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(reach, 0.98, "constant", color=theme.muted, va="top", ha="right", fontsize=8)
    axes.plot([0, reach], [1, 1 + reach], color=theme.muted, linewidth=1.2, linestyle=":")
    top = 1.1 * tallest
    height = 1 + 0.7 * (top - 1)
    axes.text(height - 1, height, "  token by token", color=theme.muted, va="top", fontsize=8)
    axes.set_xlim(-0.02 * reach, reach)
    axes.set_ylim(0, top)
    label_ends(axes, longest * 1.03, ends, gap=0.08 * top)
    axes.set_xlabel("drafted tokens that a pass verifies (mean, for K = 1, 2, ...)")
    axes.set_ylabel("time of a pass / plain pass")
    caption(figure, pair.caption, theme)
    return figure


def _verify_points(pair: PairData, domain: str) -> list[tuple[float, float, float]]:
    plain = pair.cells[domain].get(0)
    if plain is None or plain.verify_ms is None:
        return []
    found: list[tuple[float, float, float]] = []
    for k in pair.ks:
        cell = pair.cells[domain].get(k)
        if cell and cell.verify_ms and cell.drafted_per_round is not None:
            mean, std = _over(cell.verify_ms, plain.verify_ms.mean)
            found.append((cell.drafted_per_round, mean, std))
    return found


def _over(spread: Spread, level: float) -> tuple[float, float]:
    return spread.mean / level, (spread.std or 0.0) / level
