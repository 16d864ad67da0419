"""Parts that say whether speculation changed anything: certificates, equal tokens, quality."""

from __future__ import annotations

from functools import partial

from outrider.bench.quality.measure import FormatRow, RuleRow
from outrider.bench.quality.report import Quality, sections
from outrider.bench.report.pieces import plain_table, tables_of
from outrider.bench.report.reading import (
    Record,
    count_of,
    doubts,
    object_of,
    objects_of,
    origin_of,
    ratio_of,
    several,
    text_of,
    value_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Origin, Part, Table
from outrider.bench.store import RecordError

_TITLES = {
    "parity": "Tokens with speculation on and off",
    "engines_parity": "Tokens by way of arranging the work",
    "features": "Tokens by feature of a request",
}


def certificate(source: Source) -> list[Part]:
    """Of `outrider verify --output`. Raises RecordError."""
    record = source.record
    checks = objects_of(record, "checks")
    holds = record.get("holds")
    if not isinstance(holds, bool) or not checks:
        raise RecordError("it has no verdict")
    about = object_of(record, "about")
    target, draft = (text_of(object_of(about, side), "name", "-") for side in ("target", "draft"))
    machine = text_of(about, "machine")
    versions = ", ".join(f"{k} {v}" for k, v in object_of(about, "versions").items())
    facts = {
        "target": target,
        "draft": draft,
        "machine": machine,
        "utc": text_of(about, "utc"),
        "packages": versions,
    }
    known = [(name, value) for name, value in facts.items() if value]
    failed = [text_of(check, "name", "?") for check in checks if check.get("holds") is not True]
    return [
        Part(
            kind="certificate",
            title=f"Certificate: {target}",
            place=source.place,
            about=[f"{len(checks)} checks of {target} with {draft} on {machine or 'a machine'}."],
            findings=[text_of(record, "verdict")],
            tables=[
                Table(
                    title="Checks",
                    header=("check", "holds", "summary"),
                    rows=[
                        (
                            text_of(check, "name"),
                            "yes" if check.get("holds") is True else "NO",
                            text_of(check, "summary"),
                        )
                        for check in checks
                    ],
                )
            ],
            warnings=[f"Checks that failed: {', '.join(failed)}."] if failed or not holds else [],
            # A certificate is of a pair and a version, whatever commit it was made with.
            origins=[Origin(facts=known, machine="", commit=None, dirty=False)],
        )
    ]


def quality(source: Source) -> list[Part]:
    """Of `outrider bench quality --output`. Raises RecordError."""
    record = source.record
    found = Quality(
        formats=several("format", objects_of(record, "formats"), partial(value_of, FormatRow)),
        rules=several("rule", objects_of(record, "rules"), _rule),
    )
    if not found.formats and not found.rules:
        raise RecordError("it has neither a format nor a rule")
    origins = [origin_of(record)]
    own = list(sections(found))
    broken = [row.rule for row in found.rules if row.broken]
    name = text_of(record, "pair", "a pair")
    return [
        Part(
            kind="quality",
            title=f"Quality: {name}",
            place=source.place,
            about=[f"{len(found.formats)} number formats and {len(found.rules)} rules on {name}."],
            findings=[point for section in own for point in section.points],
            tables=tables_of(own),
            warnings=[
                *(f"{rule} broke its promise." for rule in broken),
                *doubts(record, [], origins),
            ],
            origins=origins,
        )
    ]


def _rule(record: Record) -> RuleRow:
    return value_of(RuleRow, record, against_plain=ratio_of(record, "against_plain"))


def parity(source: Source) -> list[Part]:
    """Of benchmarks that count equal tokens. Raises RecordError."""
    record = source.record
    num, equal = count_of(record, "num_tokens"), count_of(record, "num_equal")
    cells = objects_of(record, "cells")
    title = _TITLES[source.kind]
    origins = [origin_of(record)]
    # A row of settings is an object of its own in two of them.
    flat: list[Record] = [{**object_of(cell, "row"), **cell} for cell in cells]
    verb = "is" if num == equal else "is NOT"
    return [
        Part(
            kind="equal tokens",
            title=title,
            place=source.place,
            about=[f"{len(cells)} settings, {text_of(record, 'num_prompts', '?')} prompts."],
            findings=[
                f"{equal:,} of {num:,} tokens are equal: the text {verb} the same everywhere."
            ],
            tables=[plain_table(title, flat)],
            warnings=[
                *([f"{num - equal:,} tokens differ."] if num != equal else []),
                *doubts(record, [], origins),
            ],
            origins=origins,
        )
    ]
