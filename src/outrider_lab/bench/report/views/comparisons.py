"""The parts that set several ways of decoding, or programs, beside each other.

A committed result of drafters or engines has several tiers; each is a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.charts import Axis, Chart, Lines
from outrider_lab.bench.peers.contestants import OURS
from outrider_lab.bench.peers.report import tables
from outrider_lab.bench.report.parts import (
    Claim,
    ClaimKind,
    Figure,
    Part,
    Record,
    Source,
    by_tier,
    number_of,
    object_of,
    objects_of,
    own_words,
    part_of,
    positive_of,
    stored,
    tables_of,
    text_of,
    texts_of,
)
from outrider_lab.bench.report.plots import by_level, claims_chart, pareto
from outrider_lab.bench.studies import drafters_report, engines_report
from outrider_lab.bench.studies.drafters_lineup import OFF
from outrider_lab.bench.studies.drafters_report import EVERYTHING
from outrider_lab.bench.studies.engines_cells import EngineCell, EngineComparison, EnginesEvidence
from outrider_lab.bench.studies.engines_report import (
    LOAD_COLUMNS,
    LOAD_NOTE,
    columns,
    load_failures,
)
from outrider_lab.measure.store import RecordError, Section, made, plain_table
from outrider_lab.planner.advise import RatePoint

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
    evidence = made(drafters_report.DraftersEvidence, record, tolerant=True)
    found = evidence.cells
    if not found:
        raise RecordError("it has no cells")
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
            for name, chart in drafters_report.charts(found, foot).items()
        ],
        tables=tables_of(drafters_report.sections(evidence)),
    )


def engines(source: Source) -> list[Part]:
    """Raises RecordError."""
    return [_engines(source, record, name) for record, name in by_tier(source.record)]


def _engines(source: Source, record: Record, name: str) -> Part:
    evidence = made(EnginesEvidence, record, tolerant=True)
    if not evidence.cells:
        raise RecordError("it has no cells")
    levels = sorted({one.level for one in evidence.cells})
    names = list(dict.fromkeys(one.engine for one in evidence.cells))
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
        claims=[_engines_claim(one, f"{one.level} in flight") for one in evidence.comparisons],
        figures=[
            *_ratio_figures(evidence.comparisons, foot),
            *_level_figures(evidence.cells, foot),
        ],
        pictures=stored(source.path.parent, "lanes_", "What the lanes did, engine"),
        tables=tables_of(engines_report.sections(evidence)),
    )


def _engines_claim(found: EngineComparison, where: str) -> Claim:
    if found.role.endswith(_OVER_OFF):
        return _speculation(f"{found.ours}, {where}", found.throughput)
    return Claim(
        kind="arrangement",
        where=f"{found.role}, {where}",
        against=found.theirs,
        ratio=found.throughput,
    )


def _ratio_figures(compared: Sequence[EngineComparison], foot: str) -> list[Figure]:
    series: dict[str, dict[int, Ratio]] = {}
    for one in compared:
        if one.role.endswith(_OVER_OFF):
            series.setdefault(one.ours, {})[one.level] = one.throughput
    if not series:
        return []
    title = "Throughput over plain decoding by requests in flight"
    chart = by_level(series, title, engines_report.LEVELS, foot)
    words = f"{title} with 95 % intervals, a line an engine. {_BELOW}"
    return [Figure(name="speedup_vs_concurrency", chart=chart, words=words)]


def _level_figures(found: Sequence[EngineCell], foot: str) -> list[Figure]:
    """Those that the run itself draws, and the frontier."""
    figures = [
        Figure(
            name=name,
            chart=chart,
            words=f"{chart.title}, a line an engine, plain decoding in grey. {_BELOW}",
        )
        for name, chart in engines_report.charts(found, foot).items()
        if any(engines_report.FIGURES[name][2](one) is not None for one in found)
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
    evidence = made(EnginesEvidence, record, tolerant=True)
    found, compared = evidence.cells, evidence.comparisons
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
    found: Sequence[EngineCell], cases: Sequence[Record], names: Sequence[str], foot: str
) -> list[Figure]:
    """By requests in flight if all cases are closed loops, which say how many there are."""
    in_flight = {level: number_of(case, "num_in_flight") for level, case in enumerate(cases)}
    closed = {level: int(number) for level, number in in_flight.items() if number is not None}
    if len(set(closed.values())) == len(cases) and len(cases) > 1:
        return _level_figures([replace(one, level=closed[one.level]) for one in found], foot)
    engines = list(dict.fromkeys(one.engine for one in found))
    panels: list[Lines] = []
    for name, title in _OF_LOAD.items():
        _, label, value = engines_report.FIGURES[name]
        lines = [
            replace(
                line,
                points=[(x + 0.08 * (i - (len(engines) - 1) / 2), y) for x, y in line.points],
                dash="",
            )
            for i, line in enumerate(engines_report.lines(found, value, float))
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


def peers(source: Source) -> list[Part]:
    """Of a comparison with other programs. Raises RecordError."""
    record = source.record
    scores, found = objects_of(record, "scores"), objects_of(record, "ratios")
    if not scores:
        raise RecordError("it has no scores")
    owners = {text_of(score, "contestant"): text_of(score, "peer") for score in scores}
    claims = [claim for one in found if (claim := _peers_claim(owners, one)) is not None]
    tier = text_of(record, "tier", "?").upper()
    versions, refused = object_of(record, "versions"), object_of(record, "refused")
    return [
        part_of(
            source,
            kind="peers",
            title=f"Beside other programs: tier {tier}",
            about=[
                f"{len(scores)} contestants on tier {tier}, {text_of(record, 'threads', '?')} "
                f"threads, up to {text_of(record, 'max_tokens', '?')} tokens; "
                f"{text_of(record, 'order', 'in turns')}."
            ],
            findings=[
                *(
                    f"{name}: {', '.join(str(v) for v in object_of(versions, name).values()):.160}"
                    for name in versions
                ),
                *(f"Refused: {name}: {str(why).strip():.200}" for name, why in refused.items()),
                *texts_of(record, "notes"),
            ],
            claims=claims,
            figures=_peers_figures(claims, f"tier {tier}"),
            tables=tables(scores, found),
        )
    ]


def transformers(source: Source) -> list[Part]:
    """Of the study `vs_transformers`, whose ratios have no interval. Raises RecordError."""
    record = source.record
    batches = {n: object_of(record, n) for n in record if n.startswith("batch_")}
    if not batches:
        raise RecordError("it has no batches")
    rows: list[Record] = []
    claims: list[Claim] = []
    for name, batch in batches.items():
        words = name.replace("_", " ")
        scores, best = object_of(batch, "scores"), object_of(batch, "best")
        rows += [{"batch": words, "contestant": n, **object_of(scores, n)} for n in scores]
        for what, ours, theirs in (("plain", "plain", "hf_plain"), ("speculation", "spec", "hf")):
            pair = f"{text_of(best, ours, '?')} over {text_of(best, theirs, '?')}"
            ratio = Ratio(positive_of(batch, f"{what}_ratio"), None, None, 0)
            where = f"{words}, {pair}"
            claims.append(Claim(kind="peer", where=where, against="transformers", ratio=ratio))
    return [
        part_of(
            source,
            kind="peers",
            title="Beside transformers",
            about=[f"{text_of(record, 'prompts', '?')} prompts, the same tokens counted."],
            claims=claims,
            figures=_peers_figures(claims, "medians"),
            tables=[plain_table("Contestants", rows)],
        )
    ]


def _peers_claim(owners: Mapping[str, str], record: Record) -> Claim | None:
    """Two contestants of this program are ways to run it, its plain decoding among them; two of
    another program are not our claim."""
    heat = number_of(record, "temperature") or 0.0
    ours, theirs = text_of(record, "ours", "?"), text_of(record, "theirs", "?")
    low, high = number_of(record, "low"), number_of(record, "high")
    num_pairs = int(number_of(record, "pairs") or 0)
    ratio = Ratio(positive_of(record, "faster"), low, high, num_pairs)
    kind: ClaimKind = "peer"
    if owners.get(ours) and owners.get(ours) == owners.get(theirs):
        if owners[ours] != OURS:
            return None
        plain = text_of(record, "what").endswith("over plain")
        kind = "speculation" if plain else "arrangement"
    where = f"{ours} over {theirs}{f', T={heat:g}' if heat else ''}"
    return Claim(kind=kind, where=where, against=theirs, ratio=ratio)


def _peers_figures(claims: Sequence[Claim], foot: str) -> list[Figure]:
    if not claims:
        return []
    beside = [claim for claim in claims if claim.kind == "peer"] or claims
    title = "Tokens a second over those of other programs"
    chart = claims_chart(beside, title, "times the other program", foot)
    words = f"A dot a pair of contestants with its interval, beside a line at 1. {_BELOW}"
    return [Figure(name="beside_peers", chart=chart, words=words)]
