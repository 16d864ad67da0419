"""Parts of a comparison of drafters, from `results.json` or a committed result.

A committed result has several tiers; each is a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider.bench.report.pieces import by_tier, own_words, tables_of
from outrider.bench.report.reading import (
    Record,
    count_of,
    doubts,
    number_of,
    object_of,
    objects_of,
    origin_of,
    ratio_of,
    several,
    shares_of,
    text_of,
    value_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Claim, Figure, Part
from outrider.bench.store import RecordError
from outrider.bench.studies.drafters_figures import FIGURES
from outrider.bench.studies.drafters_lineup import OFF
from outrider.bench.studies.drafters_report import EVERYTHING, Cell, Evidence, findings, sections

_TITLES = {
    "speedup_by_drafter": (
        "Speed-up by drafter",
        "A dot a drafter with its interval, a panel a domain, beside a line at plain decoding.",
    ),
    "acceptance_by_position": (
        "Acceptance by position",
        "How many drafts kept each position in a row, a row a drafter, a panel a domain.",
    ),
}


def parts(source: Source) -> list[Part]:
    """Raises RecordError."""
    return [_part(source, record, name) for record, name in by_tier(source.record)]


def _part(source: Source, record: Record, name: str) -> Part:
    found = several("cell", objects_of(record, "cells"), _cell)
    if not found:
        raise RecordError("it has no cells")
    agreement = object_of(record, "agreement")
    evidence = Evidence(
        cells=found,
        skipped={name: str(why) for name, why in object_of(record, "skipped").items()},
        agreement=(count_of(agreement, "runs"), count_of(agreement, "same_tokens"))
        if agreement
        else (0, 0),
        foreign_cpu_share=number_of(record, "foreign_cpu_share"),
    )
    claims = [claim for cell in found if (claim := _claim(cell)) is not None]
    origins = [origin_of(record)]
    domains = [d for d in dict.fromkeys(cell.domain for cell in found) if d != EVERYTHING]
    names = {cell.contestant for cell in found} - {OFF}
    return Part(
        kind="drafters",
        title=f"Drafters: {name}",
        place=source.place,
        about=[f"{len(names)} drafters on {name}, prompts of {', '.join(domains)}"],
        findings=own_words(findings(evidence)),
        claims=claims,
        figures=_figures(found, f"{name}, run {text_of(record, 'run_id', 'as committed')}"),
        tables=tables_of(sections(evidence)),
        warnings=doubts(record, claims, origins),
        origins=origins,
    )


def _cell(record: Record) -> Cell:
    return value_of(
        Cell,
        record,
        speedup=ratio_of(record, "speedup"),
        by_position=tuple(shares_of(record, "by_position")),
    )


def _claim(cell: Cell) -> Claim | None:
    if cell.speedup is None or cell.contestant == OFF or cell.domain == EVERYTHING:
        return None
    where = f"{cell.domain}, {cell.contestant}"
    return Claim(kind="speculation", where=where, against="plain decoding", ratio=cell.speedup)


def _figures(found: Sequence[Cell], words: str) -> list[Figure]:
    drafted = [cell for cell in found if cell.contestant != OFF]
    if not any(cell.domain != EVERYTHING for cell in drafted):
        return []
    return [
        Figure(
            name=name,
            title=_TITLES[name][0],
            alt=f"{_TITLES[name][1]} Numbers are in the table below.",
            draw=partial(draw, drafted, words),
        )
        for name, draw in FIGURES.items()
        if name in _TITLES
    ]
