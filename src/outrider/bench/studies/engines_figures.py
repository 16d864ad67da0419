"""Figures of a run over levels: latency, mean time, throughput and acceptance by concurrency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.bench.figure_lanes import LanePicture, draw_lanes
from outrider.bench.figure_panels import caption, label_ends
from outrider.bench.figure_style import THEMES, Theme, new_figure, save, themed
from outrider.bench.studies.engines_cells import Cell, Taken
from outrider.bench.studies.engines_plan import OFF

# File name: title, label of the axis, value of a cell.
FIGURES: Mapping[str, tuple[str, str, Callable[[Cell], float | None]]] = {
    "itl_p95_vs_concurrency": (
        "Inter-token latency, percentile 95, by requests in flight",
        "milliseconds",
        lambda cell: cell.itl_p95_ms,
    ),
    "latency_vs_concurrency": (
        "Mean time of a request, by requests in flight",
        "milliseconds",
        lambda cell: cell.total_mean_ms,
    ),
    "throughput_vs_concurrency": (
        "Throughput by requests in flight",
        "tokens a second",
        lambda cell: cell.tokens_per_second,
    ),
    "acceptance_vs_concurrency": (
        "Acceptance by requests in flight",
        "accepted, % of drafted",
        lambda cell: None if cell.acceptance is None else 100 * cell.acceptance,
    ),
}


def draw_all(found: Sequence[Cell], words: str, folder: Path, *, prefix: str = "") -> list[Path]:
    """Write every figure, light and dark, as SVG and PNG; `words` stand at the foot."""
    written: list[Path] = []
    for name in FIGURES:
        for theme in THEMES:
            with themed(theme):
                figure = draw(found, name, words, theme)
                written += save(figure, folder, f"{prefix}{name}", theme)
    return written


def draw_pairs(
    pairs: Mapping[str, Sequence[Cell]], engine: str, words: str, folder: Path
) -> list[Path]:
    """The same figures with a line a pair instead, all of them run by `engine`."""
    found = [
        replace(cell, engine=pair)
        for pair, own in pairs.items()
        for cell in own
        if cell.engine == engine
    ]
    return draw_all(found, f"{words}, {engine}", folder, prefix="pairs_")


def draw_timelines(taken: Sequence[Taken], words: str, folder: Path) -> list[Path]:
    """What the lanes of every engine did at the highest level, at the last repeat."""
    highest = max((one.sample.level for one in taken if one.jobs), default=0)
    last = {t.sample.engine: t for t in taken if t.jobs and t.sample.level == highest}
    written: list[Path] = []
    for engine, one in last.items():
        picture = LanePicture(
            jobs=one.jobs,
            rounds=[r for served in one.served if served.result for r in served.result.rounds],
            title=f"What the lanes of {engine} did, {highest} requests in flight",
            small_print=words,
        )
        written += draw_lanes(picture, folder, f"lanes_{engine}")
    return written


def draw(found: Sequence[Cell], name: str, words: str, theme: Theme) -> Any:
    """A line an engine over the levels, which stand at equal distances."""
    title, label, value = FIGURES[name]
    figure = new_figure(3.8, title)
    axes = figure.subplots()
    levels = sorted({cell.level for cell in found})
    ends: list[tuple[str, float, str]] = []
    for engine, color, marker in _styles(found, theme):
        points = [
            (levels.index(cell.level), height)
            for cell in found
            if cell.engine == engine and (height := value(cell)) is not None
        ]
        if points:
            places, heights = zip(*points, strict=True)
            axes.plot(places, heights, color=color, marker=marker)
            ends.append((engine, heights[-1], color))
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlim(-0.3, len(levels) - 0.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in flight (0 = one at a time, with gaps)")
    axes.set_ylabel(label)
    label_ends(axes, len(levels) - 0.9, ends, gap=0.055 * axes.get_ylim()[1])
    caption(figure, words, theme)
    return figure


def _styles(found: Sequence[Cell], theme: Theme) -> list[tuple[str, str, str]]:
    """Plain decoding is grey, the others have a hue each."""
    engines = list(dict.fromkeys(cell.engine for cell in found))
    hues = iter(theme.hues)
    colors = {name: theme.muted if name == OFF else next(hues) for name in engines}
    return [(name, colors[name], "os^Dvp"[i % 6]) for i, name in enumerate(engines)]
