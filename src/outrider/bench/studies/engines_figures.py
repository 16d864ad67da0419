"""Figures of a run over levels: latency, mean time, throughput and acceptance by concurrency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.bench.charts import MARKS, Axis, Chart, Color, Line, Lines, ticks_of
from outrider.bench.drawing import write_all
from outrider.bench.lanes import LanePicture, lane_chart
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
LEVELS = "requests in flight (0 = one at a time, with gaps)"


def draw_all(found: Sequence[Cell], words: str, folder: Path, *, prefix: str = "") -> list[Path]:
    """Write every figure, light and dark, as SVG and PNG; `words` stand at the foot."""
    own = {f"{prefix}{name}": chart for name, chart in charts(found, words).items()}
    return write_all(own, folder)


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
    pictures = {
        f"lanes_{engine}": LanePicture(
            jobs=one.jobs,
            rounds=[r for served in one.served if served.result for r in served.result.rounds],
            title=f"What the lanes of {engine} did, {highest} requests in flight",
            small_print=words,
        )
        for engine, one in last.items()
    }
    return write_all({name: lane_chart(one) for name, one in pictures.items()}, folder)


def charts(found: Sequence[Cell], words: str) -> dict[str, Chart]:
    """By the name of their files: a line an engine over levels at equal distances."""
    levels = sorted({cell.level for cell in found})
    return {
        name: Chart(
            title=title,
            panels=[
                [
                    Lines(
                        lines=list(lines(found, value, levels.index)),
                        x=Axis(label=LEVELS, ticks=ticks_of(levels)),
                        y=Axis(label=label, low=0),
                    )
                ]
            ],
            foot=words,
        )
        for name, (title, label, value) in FIGURES.items()
    }


def lines(
    found: Sequence[Cell], value: Callable[[Cell], float | None], place: Callable[[int], float]
) -> Iterator[Line]:
    """Plain decoding is grey, the others have a hue each."""
    engines = list(dict.fromkeys(cell.engine for cell in found))
    drafting = [engine for engine in engines if engine != OFF]
    for number, engine in enumerate(engines):
        color: Color = "muted" if engine == OFF else drafting.index(engine)
        own = [(place(cell.level), value(cell)) for cell in found if cell.engine == engine]
        yield Line(
            name=engine,
            points=[(x, height) for x, height in own if height is not None],
            color=color,
            mark=MARKS[number % len(MARKS)],
        )
