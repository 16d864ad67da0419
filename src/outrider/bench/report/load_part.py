"""The part of a load run (`outrider bench load`), from its `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import Theme, new_figure
from outrider.bench.report.engines_part import (
    cell,
    claim_of,
    comparison,
    level_figures,
    pareto_figure,
)
from outrider.bench.report.pieces import plain_table
from outrider.bench.report.reading import (
    Record,
    doubts,
    number_of,
    objects_of,
    origin_of,
    several,
    text_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Figure, Part, Table
from outrider.bench.store import RecordError
from outrider.bench.studies.engines_cells import Cell
from outrider.bench.studies.engines_figures import FIGURES
from outrider.bench.studies.engines_plan import OFF
from outrider.bench.studies.engines_report import LOAD_COLUMNS, LOAD_NOTE, columns, load_failures

_COLUMNS = ("engine", *LOAD_COLUMNS, "status")
_PANELS = ("throughput_vs_concurrency", "itl_p95_vs_concurrency")


def part(source: Source) -> list[Part]:
    """Raises RecordError."""
    record = source.record
    cases = objects_of(record, "cases")
    found = several("cell", objects_of(record, "cells"), cell)
    compared = several("comparison", objects_of(record, "comparisons"), comparison)
    levels = {one.level for one in found} | {one.level for one in compared}
    if not found or max(levels) >= len(cases):
        raise RecordError("its cells are not of its cases")
    names = [text_of(case, "name", "?") for case in cases]
    claims = [claim_of(one, names[one.level]) for one in compared]
    origins = [origin_of(record)]
    name = text_of(record, "pair", "a pair")
    foot = f"{name}, run {text_of(record, 'run_id', 'unknown')}"
    wins = objects_of(record, "head_to_head")
    return [
        Part(
            kind="load",
            title=f"Load: {name}",
            place=source.place,
            about=[f"{text_of(case, 'name')}: {text_of(case, 'text')}" for case in cases],
            findings=load_failures(found, names),
            claims=claims,
            figures=_figures(found, cases, names, foot),
            tables=[
                Table(
                    title="Load",
                    header=("case", *_COLUMNS),
                    rows=[(names[one.level], *columns(one, _COLUMNS)) for one in found],
                    note=LOAD_NOTE,
                ),
                *([plain_table("Head to head: visits won", wins)] if wins else []),
            ],
            warnings=doubts(record, claims, origins),
            origins=origins,
        )
    ]


def by_case(found: Sequence[Cell], names: Sequence[str], foot: str, theme: Theme) -> Any:
    """Throughput and ITL percentile 95: a dot an engine and case; plain decoding is grey."""
    figure = new_figure(3.8, "Throughput and latency by case")
    panels = figure.subplots(1, len(_PANELS))
    engines = list(dict.fromkeys(one.engine for one in found))
    for axes, name in zip(panels, _PANELS, strict=True):
        title, label, value = FIGURES[name]
        axes.set_title(title.partition(",")[0] if "latency" in title else "Throughput", loc="left")
        hues = iter(theme.hues * 4)
        for number_, engine in enumerate(engines):
            color = theme.muted if engine == OFF else next(hues)
            points = [
                (one.level + 0.08 * (number_ - (len(engines) - 1) / 2), height)
                for one in found
                if one.engine == engine and (height := value(one)) is not None
            ]
            if points:
                marker = "os^Dvp"[number_ % 6]
                axes.plot(*zip(*points, strict=True), marker, color=color, label=engine)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_ylabel(label)
    panels[-1].legend(frameon=False, fontsize=8)
    caption(figure, foot, theme)
    return figure


def _figures(
    found: Sequence[Cell], cases: Sequence[Record], names: Sequence[str], foot: str
) -> list[Figure]:
    """By requests in flight if all cases are closed loops, which say how many there are."""
    in_flight = {level: number_of(case, "num_in_flight") for level, case in enumerate(cases)}
    closed: Mapping[int, int] = {k: int(n) for k, n in in_flight.items() if n is not None}
    if len(set(closed.values())) == len(cases) and len(cases) > 1:
        moved = [replace(one, level=closed[one.level]) for one in found]
        return [*level_figures(moved, foot), *pareto_figure(moved, foot)]
    return [
        Figure(
            name="load_by_case",
            title="Throughput and latency by case",
            alt="Tokens a second and percentile 95 of the inter-token latency, a dot an engine and "
            "case. Numbers are in the table below.",
            draw=partial(by_case, found, names, foot),
        )
    ]
