"""The figure of a sweep: speed-up and latency by the value that varies, a line for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.figure_style import THEMES, Theme, caption, new_figure, save, spread_out, themed
from outrider.cli.simulate_setup import Sweep
from outrider.planner.simulate_study import PLAIN, Comparison


def draw_sweep(
    sweep: Sweep, found: Sequence[Comparison], path: Path, *, small_print: str
) -> list[Path]:
    """For light and for dark pages, as SVG and PNG beside `path`."""
    written: list[Path] = []
    for theme in THEMES:
        with themed(theme):
            figure = _figure(sweep, found, theme, small_print)
            written += save(figure, path.parent, path.stem, theme)
    return written


def _figure(sweep: Sweep, found: Sequence[Comparison], theme: Theme, small_print: str) -> Any:
    figure = new_figure(3.8, f"Simulated engines by {sweep.name}")
    ups, late = figure.subplots(1, 2)
    engines = found[0].study.engines
    colors = dict(zip(engines, theme.hues, strict=False)) | {PLAIN: theme.muted}
    _panel(ups, sweep, {e: [one.speedup(e) or 0.0 for one in found] for e in engines}, colors)
    ups.axhline(1.0, color=theme.muted, linestyle=(0, (4, 3)), linewidth=1.2)
    ups.set_title("speed-up over plain decoding", loc="left")
    latencies = {e: [1e3 * one.numbers[e].latency.p95 for one in found] for e in (PLAIN, *engines)}
    _panel(late, sweep, latencies, colors)
    late.set_title("latency of a request, p95, ms", loc="left")
    for axes in (ups, late):
        axes.set_ylim(bottom=0)
    caption(figure, small_print, theme)
    return figure


def _panel(axes: Any, sweep: Sweep, lines: dict[str, list[float]], colors: dict[str, str]) -> None:
    """Values stand at equal distances, and each line is named at its end."""
    places = range(len(sweep.words))
    for engine, values in lines.items():
        axes.plot(places, values, color=colors[engine], marker="o")
    highest = max(max(values) for values in lines.values())
    ends = spread_out([values[-1] for values in lines.values()], 0.07 * highest)
    for engine, height in zip(lines, ends, strict=True):
        axes.text(len(places) - 0.85, height, engine, color=colors[engine], va="center")
    axes.set_xticks(places, sweep.words)
    axes.set_xlim(-0.3, len(places) - 0.2)
    axes.set_xlabel(sweep.name)
