"""Parts that say whether speculation changed anything: certificates, equal tokens, quality."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_lab.bench.quality import Quality, sections
from outrider_lab.bench.report.parts import (
    Origin,
    Part,
    Record,
    Source,
    count_of,
    object_of,
    objects_of,
    part_of,
    tables_of,
    text_of,
)
from outrider_lab.measure.store import RecordError, Section, made, plain_table

_PARITY: Mapping[str, str] = {
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
    rows = [
        (
            text_of(check, "name"),
            "yes" if check.get("holds") is True else "NO",
            text_of(check, "summary"),
        )
        for check in checks
    ]
    return [
        Part(
            kind="certificate",
            title=f"Certificate: {target}",
            place=source.place,
            about=[f"{len(checks)} checks of {target} with {draft} on {machine or 'a machine'}."],
            findings=[text_of(record, "verdict")],
            tables=[Section(title="Checks", header=("check", "holds", "summary"), rows=rows)],
            warnings=[f"Checks that failed: {', '.join(failed)}."] if failed or not holds else [],
            # A certificate is of a pair and a version, whatever commit it was made with.
            origins=[Origin(facts=known, machine="", commit=None, dirty=False)],
        )
    ]


def quality(source: Source) -> list[Part]:
    """Of `outrider bench quality --output`. Raises RecordError."""
    record = source.record
    found = made(Quality, record, tolerant=True)
    if not found.formats and not found.rules:
        raise RecordError("it has neither a format nor a rule")
    own = list(sections(found))
    name = text_of(record, "pair", "a pair")
    return [
        part_of(
            source,
            kind="quality",
            title=f"Quality: {name}",
            about=[f"{len(found.formats)} number formats and {len(found.rules)} rules on {name}."],
            findings=[point for section in own for point in section.points],
            tables=tables_of(own),
            warnings=[f"{row.rule} broke its promise." for row in found.rules if row.broken],
        )
    ]


def parity(source: Source) -> list[Part]:
    """Of benchmarks that count equal tokens. Raises RecordError."""
    record = source.record
    num, equal = count_of(record, "num_tokens"), count_of(record, "num_equal")
    cells = objects_of(record, "cells")
    # A row of settings is an object of its own in two of them.
    flat: list[Record] = [{**object_of(cell, "row"), **cell} for cell in cells]
    verb = "is" if num == equal else "is NOT"
    title = _PARITY[source.kind]
    return [
        part_of(
            source,
            kind="equal tokens",
            title=title,
            about=[f"{len(cells)} settings, {text_of(record, 'num_prompts', '?')} prompts."],
            findings=[
                f"{equal:,} of {num:,} tokens are equal: the text {verb} the same everywhere."
            ],
            tables=[plain_table(title, flat)],
            warnings=[f"{num - equal:,} tokens differ."] if num != equal else [],
        )
    ]
