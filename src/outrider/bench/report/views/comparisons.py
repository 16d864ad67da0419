"""The parts that set several ways of decoding beside each other: drafters, engines, loads.

A committed result of drafters or engines has several tiers; each is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from outrider.bench.charts import Axis, Chart, Lines
from outrider.bench.frame import Ratio
from outrider.bench.pages import Section
from outrider.bench.report.parts import Claim, Figure, Part, Record, Source
from outrider.bench.report.plots import by_level, pareto
from outrider.bench.report.reading import (
    by_tier,
    count_of,
    number_of,
    object_of,
    objects_of,
    own_words,
    part_of,
    plain_table,
    ratio_of,
    several,
    shares_of,
    stored,
    tables_of,
    text_of,
    texts_of,
    value_of,
)
from outrider.bench.store import RecordError
from outrider.bench.studies import (
    drafters_figures,
    drafters_report,
    engines_figures,
    engines_report,
)
from outrider.bench.studies.drafters_lineup import OFF
from outrider.bench.studies.drafters_report import EVERYTHING
from outrider.bench.studies.drafters_report import Cell as DrafterCell
from outrider.bench.studies.engines_cells import (
    AheadPrediction,
    Cell,
    Comparison,
    Evidence,
    LaneBound,
)
from outrider.bench.studies.engines_report import LOAD_COLUMNS, LOAD_NOTE, columns, load_failures
from outrider.estimate.theory import AheadTimes
from outrider.planner.advise import RatePoint

T = TypeVar("T")

_BELOW = "Numbers are in the table below."
_DRAFTERS: Mapping[str, str] = {
    "speedup_by_drafter": "A dot a drafter with its interval, a panel a domain, beside a line at "
    "plain decoding.",
    "acceptance_by_position": "How many drafts kept each position in a row, a row a drafter, a "
    "panel a domain.",
}
_OVER_OFF = " over off"
_LOAD = ("engine", *LOAD_COLUMNS, "status")
_OF_LOAD = {"throughput_vs_concurrency": "Throughput", "itl_p95_vs_concurrency": "Latency"}


def drafters(source: Source) -> list[Part]:
    """Raises RecordError."""
    return [_drafters(source, record, name) for record, name in by_tier(source.record)]


def _drafters(source: Source, record: Record, name: str) -> Part:
    found = _some("cell", objects_of(record, "cells"), _drafter_cell)
    agreement = object_of(record, "agreement")
    evidence = drafters_report.Evidence(
        cells=found,
        skipped={name: str(why) for name, why in object_of(record, "skipped").items()},
        agreement=(count_of(agreement, "runs"), count_of(agreement, "same_tokens"))
        if agreement
        else (0, 0),
        foreign_cpu_share=number_of(record, "foreign_cpu_share"),
    )
    domains = [d for d in dict.fromkeys(cell.domain for cell in found) if d != EVERYTHING]
    names = {cell.contestant for cell in found} - {OFF}
    foot = f"{name}, run {text_of(record, 'run_id', 'as committed')}"
    return part_of(
        source,
        record,
        kind="drafters",
        title=f"Drafters: {name}",
        about=[f"{len(names)} drafters on {name}, prompts of {', '.join(domains)}"],
        findings=own_words(drafters_report.findings(evidence)),
        claims=[
            _speculation(f"{cell.domain}, {cell.contestant}", cell.speedup)
            for cell in found
            if cell.speedup and cell.contestant != OFF and cell.domain != EVERYTHING
        ],
        figures=[
            Figure(name=name, chart=chart, words=f"{_DRAFTERS[name]} {_BELOW}")
            for name, chart in drafters_figures.charts(found, foot).items()
        ],
        tables=tables_of(drafters_report.sections(evidence)),
    )


def _drafter_cell(record: Record) -> DrafterCell:
    return value_of(
        DrafterCell,
        record,
        speedup=ratio_of(record, "speedup"),
        by_position=tuple(shares_of(record, "by_position")),
    )


def engines(source: Source) -> list[Part]:
    """Raises RecordError."""
    return [_engines(source, record, name) for record, name in by_tier(source.record)]


def _engines(source: Source, record: Record, name: str) -> Part:
    found = _some("cell", objects_of(record, "cells"), partial(value_of, Cell))
    compared = several("comparison", objects_of(record, "comparisons"), _comparison)
    evidence = Evidence(
        cells=found,
        comparisons=compared,
        bounds=several("bound", objects_of(record, "lane_bounds"), partial(value_of, LaneBound)),
        predictions=several("prediction", objects_of(record, "ahead_predictions"), _prediction),
    )
    levels = sorted({one.level for one in found})
    names = list(dict.fromkeys(one.engine for one in found))
    foot = f"{name}, run {text_of(record, 'run_id', 'as committed')}"
    plan = object_of(record, "plan")
    return part_of(
        source,
        record,
        kind="engines",
        title=f"Engines: {name}",
        about=[
            f"{', '.join(names)} with {', '.join(map(str, levels))} requests in flight, "
            f"{text_of(plan, 'repeats', '?')} repeats of {text_of(plan, 'num_requests', '?')} "
            f"requests of up to {text_of(plan, 'max_tokens', '?')} tokens"
        ],
        findings=own_words(texts_of(record, "findings")),
        claims=[_engines_claim(one, f"{one.level} in flight") for one in compared],
        figures=[
            *_ratio_figures(compared, foot),
            *_level_figures(found, foot),
        ],
        pictures=stored(source.path.parent, "lanes_", "What the lanes did, engine"),
        tables=tables_of(engines_report.sections(evidence)),
    )


def _comparison(record: Record) -> Comparison:
    throughput = ratio_of(record, "throughput")
    if throughput is None:
        raise RecordError("throughput is missing")
    return value_of(Comparison, record, throughput=throughput, itl_p95=ratio_of(record, "itl_p95"))


def _prediction(record: Record) -> AheadPrediction:
    return value_of(AheadPrediction, record, times=value_of(AheadTimes, object_of(record, "times")))


def _engines_claim(found: Comparison, where: str) -> Claim:
    if found.role.endswith(_OVER_OFF):
        return _speculation(f"{found.ours}, {where}", found.throughput)
    return Claim(
        kind="arrangement",
        where=f"{found.role}, {where}",
        against=found.theirs,
        ratio=found.throughput,
    )


def _ratio_figures(compared: Sequence[Comparison], foot: str) -> list[Figure]:
    series: dict[str, dict[int, Ratio]] = {}
    for one in compared:
        if one.role.endswith(_OVER_OFF):
            series.setdefault(one.ours, {})[one.level] = one.throughput
    if not series:
        return []
    title = "Throughput over plain decoding by requests in flight"
    chart = by_level(series, title, engines_figures.LEVELS, foot)
    words = (
        "Ratios of throughput to plain decoding with 95 % intervals, a line an engine. Numbers are "
        "in the table of ratios below."
    )
    return [Figure(name="speedup_vs_concurrency", chart=chart, words=words)]


def _level_figures(found: Sequence[Cell], foot: str) -> list[Figure]:
    """Those that the run itself draws, and the frontier."""
    figures = [
        Figure(
            name=name,
            chart=chart,
            words=f"{chart.title}, a line an engine, plain decoding in grey. {_BELOW}",
        )
        for name, chart in engines_figures.charts(found, foot).items()
        if any(engines_figures.FIGURES[name][2](one) is not None for one in found)
    ]
    series: dict[str, list[RatePoint]] = {}
    for one in found:
        # Level 0 is level 1 with rests.
        if one.level and one.itl_p50_ms and one.tokens_per_second:
            point = RatePoint(str(one.level), 1000 / one.itl_p50_ms, one.tokens_per_second)
            series.setdefault(one.engine, []).append(point)
    words = (
        "Tokens a second of all requests against 1 / median inter-token latency, a line an engine "
        f"over levels, with the frontier. {_BELOW}"
    )
    if series:
        figures.append(Figure(name="pareto", chart=pareto(series, foot), words=words))
    return figures


def load(source: Source) -> list[Part]:
    """Raises RecordError."""
    record = source.record
    cases = objects_of(record, "cases")
    found = several("cell", objects_of(record, "cells"), partial(value_of, Cell))
    compared = several("comparison", objects_of(record, "comparisons"), _comparison)
    levels = {one.level for one in found} | {one.level for one in compared}
    if not found or max(levels) >= len(cases):
        raise RecordError("its cells are not of its cases")
    names = [text_of(case, "name", "?") for case in cases]
    name = text_of(record, "pair", "a pair")
    wins = objects_of(record, "head_to_head")
    table = Section(
        title="Load",
        text=[LOAD_NOTE],
        header=("case", *_LOAD),
        rows=[(names[one.level], *columns(one, _LOAD)) for one in found],
    )
    foot = f"{name}, run {text_of(record, 'run_id', 'unknown')}"
    return [
        part_of(
            source,
            kind="load",
            title=f"Load: {name}",
            about=[f"{text_of(case, 'name')}: {text_of(case, 'text')}" for case in cases],
            findings=load_failures(found, names),
            claims=[_engines_claim(one, names[one.level]) for one in compared],
            figures=_load_figures(found, cases, names, foot),
            tables=[table, *([plain_table("Head to head: visits won", wins)] if wins else [])],
        )
    ]


def _load_figures(
    found: Sequence[Cell], cases: Sequence[Record], names: Sequence[str], foot: str
) -> list[Figure]:
    """By requests in flight if all cases are closed loops, which say how many there are."""
    in_flight = {level: number_of(case, "num_in_flight") for level, case in enumerate(cases)}
    closed = {level: int(number) for level, number in in_flight.items() if number is not None}
    if len(set(closed.values())) == len(cases) and len(cases) > 1:
        return _level_figures([replace(one, level=closed[one.level]) for one in found], foot)
    engines = list(dict.fromkeys(one.engine for one in found))
    panels: list[Lines] = []
    for name, title in _OF_LOAD.items():
        _, label, value = engines_figures.FIGURES[name]
        lines = [
            replace(
                line,
                points=[(x + 0.08 * (i - (len(engines) - 1) / 2), y) for x, y in line.points],
                dash="",
            )
            for i, line in enumerate(engines_figures.lines(found, value, float))
        ]
        panels.append(
            Lines(title=title, lines=lines, x=Axis(ticks=names), y=Axis(label=label, low=0))
        )
    words = (
        "Tokens a second and percentile 95 of the inter-token latency, a dot an engine and case. "
        f"{_BELOW}"
    )
    chart = Chart(title="Throughput and latency by case", panels=[panels], foot=foot)
    return [Figure(name="load_by_case", chart=chart, words=words)]


def _speculation(where: str, ratio: Ratio) -> Claim:
    return Claim(kind="speculation", where=where, against="plain decoding", ratio=ratio)


def _some(name: str, given: Sequence[Record], read: Callable[[Record], T]) -> list[T]:
    """Raises RecordError if there are none."""
    if not given:
        raise RecordError(f"it has no {name}s")
    return several(name, given, read)
