"""Parts of a comparison of engines (bench/studies/), from `results.json` or a committed result.

A committed result has several tiers; each is a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider.bench.frame import Ratio
from outrider.bench.report.figure_pareto import pareto
from outrider.bench.report.figure_ratios import by_level
from outrider.bench.report.pieces import by_tier, own_words, stored, tables_of
from outrider.bench.report.reading import (
    Record,
    doubts,
    object_of,
    objects_of,
    origin_of,
    ratio_of,
    several,
    text_of,
    texts_of,
    value_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Claim, Figure, Part
from outrider.bench.store import RecordError
from outrider.bench.studies.engines_cells import (
    AheadPrediction,
    Cell,
    Comparison,
    Evidence,
    LaneBound,
)
from outrider.bench.studies.engines_figures import FIGURES, draw
from outrider.bench.studies.engines_report import sections
from outrider.estimate.theory import AheadTimes
from outrider.planner.advise import Point

_OVER_OFF = " over off"


def parts(source: Source) -> list[Part]:
    """Raises RecordError."""
    return [_part(source, record, name) for record, name in by_tier(source.record)]


def comparison(record: Record) -> Comparison:
    throughput = ratio_of(record, "throughput")
    if throughput is None:
        raise RecordError("throughput is missing")
    return value_of(Comparison, record, throughput=throughput, itl_p95=ratio_of(record, "itl_p95"))


def claim_of(found: Comparison, where: str) -> Claim:
    speculation = found.role.endswith(_OVER_OFF)
    return Claim(
        kind="speculation" if speculation else "arrangement",
        where=f"{found.ours}, {where}" if speculation else f"{found.role}, {where}",
        against="plain decoding" if speculation else found.theirs,
        ratio=found.throughput,
    )


def cell(record: Record) -> Cell:
    return value_of(Cell, record)


def _part(source: Source, record: Record, name: str) -> Part:
    found = several("cell", objects_of(record, "cells"), cell)
    if not found:
        raise RecordError("it has no cells")
    compared = several("comparison", objects_of(record, "comparisons"), comparison)
    evidence = Evidence(
        cells=found,
        comparisons=compared,
        bounds=several("bound", objects_of(record, "lane_bounds"), _bound),
        predictions=several("prediction", objects_of(record, "ahead_predictions"), _prediction),
    )
    claims = [claim_of(one, f"{one.level} in flight") for one in compared]
    origins = [origin_of(record)]
    levels = sorted({one.level for one in found})
    engines = list(dict.fromkeys(one.engine for one in found))
    foot = f"{name}, run {text_of(record, 'run_id', 'as committed')}"
    plan = object_of(record, "plan")
    return Part(
        kind="engines",
        title=f"Engines: {name}",
        place=source.place,
        about=[
            f"{', '.join(engines)} with {', '.join(map(str, levels))} requests in flight, "
            f"{text_of(plan, 'repeats', '?')} repeats of {text_of(plan, 'num_requests', '?')} "
            f"requests of up to {text_of(plan, 'max_tokens', '?')} tokens"
        ],
        findings=own_words(texts_of(record, "findings")),
        claims=claims,
        figures=[
            *_ratio_figures(compared, foot),
            *level_figures(found, foot),
            *pareto_figure(found, foot),
        ],
        pictures=stored(source.path.parent, "lanes_", "What the lanes did, engine"),
        tables=tables_of(sections(evidence)),
        warnings=doubts(record, claims, origins),
        origins=origins,
    )


def level_figures(found: Sequence[Cell], foot: str) -> list[Figure]:
    """Those that the run itself draws."""
    return [
        Figure(
            name=name,
            title=title,
            alt=f"{title}, a line an engine, plain decoding in grey. Numbers are in the table "
            "below.",
            draw=partial(draw, found, name, foot),
        )
        for name, (title, _, value) in FIGURES.items()
        if any(value(one) is not None for one in found)
    ]


def pareto_figure(found: Sequence[Cell], foot: str) -> list[Figure]:
    series: dict[str, list[Point]] = {}
    for one in found:
        # Level 0 is level 1 with rests.
        if one.level and one.itl_p50_ms and one.tokens_per_second:
            point = Point(str(one.level), 1000 / one.itl_p50_ms, one.tokens_per_second)
            series.setdefault(one.engine, []).append(point)
    if not series:
        return []
    return [
        Figure(
            name="pareto",
            title="Throughput against the speed of one user",
            alt="Tokens a second of all requests against 1 / median inter-token latency, a line an "
            "engine over levels, with the frontier. Numbers are in the table below.",
            draw=partial(pareto, series, foot),
        )
    ]


def _ratio_figures(compared: Sequence[Comparison], foot: str) -> list[Figure]:
    series: dict[str, dict[int, Ratio]] = {}
    for one in compared:
        if one.role.endswith(_OVER_OFF):
            series.setdefault(one.ours, {})[one.level] = one.throughput
    if not series:
        return []
    words = {
        "title": "Throughput over plain decoding by requests in flight",
        "axis": "requests in flight (0 = one at a time, with gaps)",
        "label": "times plain decoding",
        "baseline": "plain decoding",
        "foot": foot,
    }
    return [
        Figure(
            name="speedup_vs_concurrency",
            title=words["title"],
            alt="Ratios of throughput to plain decoding with 95 % intervals, a line an engine. "
            "Numbers are in the table of ratios below.",
            draw=partial(by_level, series, words),
        )
    ]


def _bound(record: Record) -> LaneBound:
    return value_of(LaneBound, record)


def _prediction(record: Record) -> AheadPrediction:
    return value_of(AheadPrediction, record, times=value_of(AheadTimes, object_of(record, "times")))
