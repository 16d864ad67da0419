"""Figures of a cost study's speed-ups: over acceptance and K, hits, fan-out, and batch.

Dots with bars are measured, with 95 % intervals; dashed lines of the same colour are what theory
makes of the same run's times; the grey line at 1 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import Theme, new_figure
from outrider.bench.gemm.record import Cell

_DASHED = (0, (2, 2))
_MAX_PANELS = 4
_SHIFT = 0.06
Pick = Callable[[Cell], float | None]


def alpha_and_k(cells: Sequence[Cell], foot: str, theme: Theme) -> Any:
    """A panel an acceptance rate, K at equal distances."""
    own = [cell for cell in cells if cell.study == "alpha" and cell.method != "ar"]
    alphas = sorted({cell.alpha for cell in own})[-_MAX_PANELS:]
    figure = new_figure(3.6, "Speed-up over plain decoding by K and acceptance rate")
    panels = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
    ks = sorted({cell.k for cell in own})
    for axes, alpha in zip(panels, alphas, strict=True):
        axes.set_title(f"alpha = {alpha:g}", loc="left")
        here = [cell for cell in own if cell.alpha == alpha]
        _methods(axes, here, lambda cell: ks.index(cell.k), theme)
        _ticks(axes, ks, "K")
    _finish(figure, panels, foot, theme)
    return figure


def hits(cells: Sequence[Cell], foot: str, theme: Theme) -> Any:
    """SSD by the forced share of foreseen verdicts, beside SD of the same K and alpha."""
    study = [c for c in cells if c.study == "hits"]
    ahead = [c for c in study if c.method == "ssd" and c.p_hit is not None]
    figure = new_figure(3.8, "SSD and SD over plain decoding, by the share of foreseen verdicts")
    axes = figure.subplots()
    kinds = sorted({(cell.k, cell.alpha, cell.batch) for cell in ahead})
    for number, kind in enumerate(kinds):
        k, alpha, batch = kind
        color = theme.hues[number % len(theme.hues)]
        own = [cell for cell in ahead if (cell.k, cell.alpha, cell.batch) == kind]
        label = f"K={k}, alpha={alpha:g}{f', batch {batch}' if batch > 1 else ''}"
        _measured(axes, own, lambda cell: cell.p_hit, (color, "o", f"SSD, {label}"))
        _theory(axes, own, lambda cell: cell.p_hit, color)
        for turn in study:
            if turn.method == "sd" and (turn.k, turn.alpha, turn.batch) == kind:
                axes.axhline(turn.speed_up, color=color, linewidth=1.2, alpha=0.6)
                axes.text(1.05, turn.speed_up, "SD", color=color, fontsize=8, va="bottom")
                break
    axes.set_xlim(-0.05, 1.1)
    axes.set_xlabel("share of verdicts that were foreseen (forced)")
    _finish(figure, [axes], f"{foot}; level lines: SD", theme)
    return figure


def fan_out(cells: Sequence[Cell], foot: str, theme: Theme) -> Any:
    """What drafting for more verdicts brings, and what it takes."""
    own = [cell for cell in cells if cell.study == "fan_out" and cell.method == "ssd"]
    figure = new_figure(3.4, "Drafting ahead by fan-out: hits and work")
    panels = figure.subplots(1, 3)
    said: Mapping[str, Pick] = {
        "verdicts foreseen, %": lambda c: None if c.p_hit_seen is None else 100 * c.p_hit_seen,
        "tokens drafted ahead, a round": lambda c: c.num_ahead,
        "drafting ahead / verifying": lambda c: c.ahead_over_verify,
    }
    fans = sorted({cell.fan_out for cell in own})
    kinds = sorted({(cell.k, cell.alpha) for cell in own})
    panels[2].axhline(1, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
    panels[2].text(-0.4, 1.02, "as long as verifying", color=theme.muted, fontsize=8)
    for axes, (label, pick) in zip(panels, said.items(), strict=True):
        for number, (k, alpha) in enumerate(kinds):
            points = [
                (fans.index(cell.fan_out), value)
                for cell in sorted(own, key=lambda cell: cell.fan_out)
                if (cell.k, cell.alpha) == (k, alpha) and (value := pick(cell)) is not None
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=theme.hues[number % len(theme.hues)],
                    marker="os^Dvp"[number % 6],
                    label=f"K={k}, alpha={alpha:g}",
                )
        _ticks(axes, fans, "fan-out")
        axes.set_ylim(bottom=0)
        axes.set_title(label, loc="left", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8)
    caption(figure, f"{foot}; a fan-out of 0 would be SD", theme)
    return figure


def batch(cells: Sequence[Cell], foot: str, theme: Theme) -> Any:
    """SD and SSD over plain decoding of the same batch."""
    own = [cell for cell in cells if cell.study == "batch" and cell.method != "ar"]
    batches = sorted({cell.batch for cell in own})
    figure = new_figure(3.8, "Speed-up over plain decoding of the same batch")
    axes = figure.subplots()
    _methods(axes, own, lambda cell: batches.index(cell.batch), theme)
    _ticks(axes, batches, "sequences at once")
    _finish(figure, [axes], foot, theme)
    return figure


def _methods(axes: Any, cells: Sequence[Cell], place: Pick, theme: Theme) -> None:
    """SD and SSD, a little apart, so that no bar hides another."""
    for number, method in enumerate(("sd", "ssd")):
        own = [cell for cell in cells if cell.method == method]
        color = theme.hues[number]
        shift = _SHIFT * (2 * number - 1)

        def moved(cell: Cell, shift: float = shift) -> float:
            return (place(cell) or 0.0) + shift

        if own:
            _measured(axes, own, moved, (color, "os"[number], method.upper()))
            _theory(axes, own, moved, color)


def _measured(axes: Any, cells: Sequence[Cell], place: Pick, look: tuple[str, str, str]) -> None:
    """`look` is colour, marker and name."""
    color, marker, label = look
    order = sorted(cells, key=lambda cell: place(cell) or 0.0)
    axes.errorbar(
        [place(cell) for cell in order],
        [cell.speed_up for cell in order],
        yerr=[
            [max(c.speed_up - c.low, 0.0) if c.low is not None else 0.0 for c in order],
            [max(c.high - c.speed_up, 0.0) if c.high is not None else 0.0 for c in order],
        ],
        color=color,
        marker=marker,
        label=label,
    )


def _theory(axes: Any, cells: Sequence[Cell], place: Pick, color: str) -> None:
    points = [
        (place(cell), cell.theory.over_verify)
        for cell in sorted(cells, key=lambda cell: place(cell) or 0.0)
        if cell.theory is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), color=color, linestyle=_DASHED, linewidth=1.2)


def _ticks(axes: Any, values: Sequence[int], label: str) -> None:
    axes.set_xticks(range(len(values)), [str(value) for value in values])
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_xlabel(label)


def _finish(figure: Any, panels: Sequence[Any], foot: str, theme: Theme) -> None:
    for axes in panels:
        axes.axhline(1, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("times plain decoding")
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(frameon=False, fontsize=8, loc="lower left")
    caption(figure, f"{foot}; bars: 95 % intervals; dashed: theory from the run's own times", theme)
