"""The parts of sweeps, from their samples.

A sweep over K has a table and figures for each pair; one over other axes has the tables of its own
report, and the figures that it drew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.bench.figures import PairData, charts, gather
from outrider.bench.frame import spoken
from outrider.bench.pages import Section
from outrider.bench.report.parts import Claim, Figure, Part, Source
from outrider.bench.report.reading import origin_of, own_words, part_of, stored, tables_of
from outrider.bench.store import RecordError
from outrider.bench.studies.sweep_cells import Cell, cells
from outrider.bench.studies.sweep_record import K_SWEEP, SWEEP, ResultsFolder, Schema
from outrider.bench.studies.sweep_report import sections, spread_text
from outrider.bench.studies.sweep_summary import axes_in, points, summary

_HEADER = (
    "domain",
    "K",
    "samples",
    "failed",
    "tok/s",
    "speed-up",
    "verdict",
    "accepted %",
    "tok/round",
    "latency ms",
)
_NOTE = (
    "± is the standard deviation of samples. A speed-up is median seconds a token of plain "
    "decoding over those of this K, over the same pieces, with its 95 % bootstrap interval."
)
# What each figure shows, for those who cannot see it; its numbers are in the table.
_WORDS: Mapping[str, str] = {
    "throughput_vs_k": "Tokens a second by K, a panel a domain; plain dashed.",
    "acceptance_vs_k": "Share of drafted tokens kept, by K, a line a domain.",
    "speedup_map": "A map of speed-ups with their intervals, by domain and K.",
    "accepted_per_round": "Share of rounds that kept 0, 1, 2 drafts.",
    "latency_cdf": "How many tokens took at most so long, a line a K.",
    "time_breakdown": "Milliseconds a token of draft, target, accept, other.",
    "verify_time_vs_k": "Time of a verifying pass over that of a plain one, beside constant and "
    "linear cost.",
}


def by_k(source: Source) -> list[Part]:
    """Raises RecordError for a folder without samples, and ConfigError for a damaged one."""
    folder = _read(source, K_SWEEP)
    found = cells(folder)
    record = summary(folder)
    pairs = gather(folder)
    return [
        part_of(
            source,
            record,
            kind="K sweep",
            title=f"K sweep: {', '.join(pair.name for pair in pairs)}",
            about=[f"{pair.caption}: {len(folder.samples):,} samples" for pair in pairs],
            findings=list(_findings(found, record)),
            claims=[claim for cell in found if (claim := _claim(cell)) is not None],
            figures=[figure for pair in pairs for figure in _figures(pair, several=len(pairs) > 1)],
            tables=[_table(pair.name, found) for pair in pairs],
            warnings=_torn(folder),
            origins=[origin_of(run) for run in folder.runs],
        )
    ]


def grid(source: Source) -> list[Part]:
    """The same errors as `by_k`."""
    folder = _read(source, SWEEP)
    found = points(folder)
    claims = [
        Claim(kind="speculation", where=point.name, against="plain decoding", ratio=point.ratio)
        for point in found
        if point.ratio is not None and not point.is_plain
    ]
    own = list(sections(folder))
    pairs = ", ".join(dict.fromkeys(str(run["pair"]) for run in folder.runs))
    return [
        part_of(
            source,
            summary(folder),
            kind="sweep",
            title=f"Sweep of {', '.join(axes_in(folder))}: {pairs}",
            about=[f"{len(found)} cells, {len(folder.samples):,} samples."],
            findings=own_words([point for section in own for point in section.points]),
            claims=claims,
            pictures=stored(source.path.parent, "by_", "By"),
            tables=tables_of(own),
            warnings=_torn(folder),
            origins=[origin_of(run) for run in folder.runs],
        )
    ]


def _read(source: Source, schema: Schema) -> ResultsFolder:
    folder = ResultsFolder.read(source.path.parent, schema)
    if not folder.samples:
        raise RecordError("no sample was written yet; the run was stopped before its first visit")
    return folder


def _torn(folder: ResultsFolder) -> list[str]:
    if not folder.store.log.torn:
        return []
    return ["The file ends in half a line: its last sample was cut off and is left out."]


def _claim(cell: Cell) -> Claim | None:
    if not cell.k or cell.speedup is None:
        return None
    where = f"{cell.pair}, {cell.domain}, K={cell.k}"
    return Claim(kind="speculation", where=where, against="plain decoding", ratio=cell.speedup)


def _findings(found: Sequence[Cell], record: Mapping[str, Any]) -> Iterator[str]:
    same = record["greedy_identical"]
    if same is not None:
        verb = "are" if same else "are NOT"
        yield f"Greedy tokens at every K {verb} those of plain decoding, in this same run."
    for pair, domain in dict.fromkeys((cell.pair, cell.domain) for cell in found):
        ratios = {
            cell.k: cell.speedup
            for cell in found
            if (cell.pair, cell.domain) == (pair, domain) and cell.k and cell.speedup
        }
        if ratios:
            best = max(ratios, key=lambda k: ratios[k].value)
            yield f"{pair}, {domain}: K={best} is best, {spoken(ratios[best])} plain decoding."
    yield from record["verdicts"]
    for cell in found:
        for reason, num in cell.failures.items():
            yield f"{cell.pair}, {cell.domain}, K={cell.k}: {num} failed: {reason}"


def _figures(pair: PairData, *, several: bool) -> Iterator[Figure]:
    for name, chart in charts(pair).items():
        yield Figure(
            name=f"{name}-{pair.name}" if several else name,
            chart=chart,
            words=f"{pair.name}: {_WORDS[name]} Numbers are in the table below.",
        )


def _table(pair: str, found: Sequence[Cell]) -> Section:
    rows = [_row(cell) for cell in found if cell.pair == pair]
    return Section(title=f"{pair} by domain and K", text=[_NOTE], header=_HEADER, rows=rows)


def _row(cell: Cell) -> tuple[str, ...]:
    claim = _claim(cell)
    return (
        cell.domain,
        str(cell.k) if cell.k else "plain",
        str(cell.num_samples),
        str(cell.num_failures),
        spread_text(cell.tokens_per_second, 1),
        "1" if cell.k == 0 else "-" if cell.speedup is None else spoken(cell.speedup),
        "" if claim is None else claim.verdict,
        spread_text(cell.acceptance, 1, scale=100),
        "-" if cell.tokens_per_round is None else f"{cell.tokens_per_round:.2f}",
        spread_text(cell.latency_ms, 1),
    )
