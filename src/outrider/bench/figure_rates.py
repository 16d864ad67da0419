"""Figures of what speculation gains and what is accepted."""

from __future__ import annotations

from typing import Any

from outrider.bench.figure_panels import PairData, caption, k_axis, label_ends, panels_of
from outrider.bench.figure_style import Theme, new_figure, readable_on
from outrider.bench.frame import Ratio


def throughput(pair: PairData, theme: Theme) -> Any:
    title = "Throughput by K (mean and standard deviation of samples)"
    figure, panels = panels_of(pair, theme, title, "tokens a second")
    for axes, domain in zip(panels, pair.domains, strict=True):
        k_axis(axes, pair.ks)
        shown = [
            (place, spread)
            for place, k in enumerate(pair.ks)
            if (cell := pair.cells[domain].get(k)) and (spread := cell.tokens_per_second)
        ]
        axes.errorbar(
            [place for place, _ in shown],
            [spread.mean for _, spread in shown],
            yerr=[spread.std or 0.0 for _, spread in shown],
            color=theme.hues[0],
            marker="o",
        )
        plain = pair.cells[domain].get(0)
        if plain and plain.tokens_per_second:
            level = plain.tokens_per_second.mean
            axes.axhline(level, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
            words = {"color": theme.muted, "fontsize": 8, "fontweight": "normal"}
            axes.set_title(f"- - plain: {level:.0f}", loc="right", **words)
    # One scale for all panels, so it is set once they have all been drawn.
    panels[0].set_ylim(bottom=0)
    return figure


def acceptance(pair: PairData, theme: Theme) -> Any:
    figure = new_figure(3.6, "Acceptance rate by K (mean and standard deviation of samples)")
    axes = figure.subplots()
    k_axis(axes, pair.ks)
    ends: list[tuple[str, float, str]] = []
    for number, domain in enumerate(pair.domains):
        color = theme.hues[number % len(theme.hues)]
        shown = [
            (place + 0.06 * (number - (len(pair.domains) - 1) / 2), spread)
            for place, k in enumerate(pair.ks)
            if (cell := pair.cells[domain].get(k)) and (spread := cell.acceptance)
        ]
        if not shown:
            continue
        axes.errorbar(
            [place for place, _ in shown],
            [100 * spread.mean for _, spread in shown],
            yerr=[100 * (spread.std or 0.0) for _, spread in shown],
            color=color,
            marker="os^Dvp"[number % 6],
        )
        ends.append((domain, 100 * shown[-1][1].mean, color))
    label_ends(axes, len(pair.ks) - 1 + 0.2, ends, gap=7)
    axes.text(-0.45, 3, "plain decoding\ndrafts nothing", color=theme.muted, fontsize=8)
    axes.set_xlim(-0.5, len(pair.ks) + 0.1)
    axes.set_ylim(0, 103)
    axes.set_ylabel("accepted, % of drafted")
    caption(figure, pair.caption, theme)
    return figure


def speedup_map(pair: PairData, theme: Theme) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    figure = new_figure(1.3 + 0.55 * len(pair.domains), "Speed-up over plain decoding (x)")
    axes = figure.subplots()
    ks = [k for k in pair.ks if k]
    ratios = [
        [(cell.speedup if (cell := pair.cells[d].get(k)) else None) for k in ks]
        for d in pair.domains
    ]
    values = [[ratio.value if ratio else 1.0 for ratio in row] for row in ratios]
    flat = [value for row in values for value in row]
    far = max(max(flat) - 1, 1 - min(flat), 0.05)
    colors = LinearSegmentedColormap.from_list("speed-up", theme.diverging)
    norm = TwoSlopeNorm(1.0, 1 - far, 1 + far)
    axes.imshow(values, cmap=colors, norm=norm, aspect="auto")
    for row, found in enumerate(ratios):
        for column, ratio in enumerate(found):
            ink = readable_on(colors(norm(values[row][column])))
            words = {"ha": "center", "color": ink}
            value, interval = _ratio_texts(ratio)
            axes.text(column, row - 0.02, value, va="bottom", fontweight="bold", **words)
            axes.text(column, row + 0.06, interval, va="top", fontsize=7.5, **words)
    axes.set_xticks(range(len(ks)), [f"K={k}" for k in ks])
    axes.set_yticks(range(len(pair.domains)), pair.domains)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    caption(figure, f"{pair.caption}; below: 95 % interval; blue faster, orange slower", theme)
    return figure


def _ratio_texts(ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return "-", ""
    interval = "" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
    return f"{ratio.value:.2f}", interval


def accepted_per_round(pair: PairData, theme: Theme) -> Any:
    ks = [k for k in pair.ks if k]
    height = 1.1 + 1.15 * len(pair.domains)
    figure = new_figure(height, "Drafts kept in a round, share of rounds")
    grid = figure.subplots(len(pair.domains), len(ks), sharey=True, squeeze=False)
    for row, domain in enumerate(pair.domains):
        color = theme.hues[row % len(theme.hues)]
        grid[row][0].set_ylabel(f"{domain}\n% of rounds")
        for column, k in enumerate(ks):
            axes = grid[row][column]
            cell = pair.cells[domain].get(k)
            counts = cell.accepted_histogram if cell else ()
            shares = [100 * count / sum(counts) for count in counts]
            axes.bar(range(len(shares)), shares, color=color, width=0.8)
            axes.set_xticks(range(0, k + 1, 1 if k <= 4 else 2 if k <= 10 else 8))
            axes.set_xlim(-0.6, k + 0.6)
            if row == 0:
                axes.set_title(f"K={k}", loc="left")
            if row == len(pair.domains) - 1:
                axes.set_xlabel("drafts kept")
    caption(figure, pair.caption, theme)
    return figure
