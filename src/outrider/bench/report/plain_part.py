"""Parts of benchmarks whose results are a table and need no figure: a row a cell."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.bench.report.pieces import plain_table
from outrider.bench.report.reading import (
    Record,
    doubts,
    object_of,
    objects_of,
    origin_of,
    shown,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Part
from outrider.bench.store import RecordError

# What each benchmark of benchmarks/ measures, in a sentence.
TITLES: Mapping[str, tuple[str, str]] = {
    "accept_cost": ("Acceptance", "Microseconds of judging a draft, native against PyTorch."),
    "batch": ("Batches", "Plain decoding of several sequences at once."),
    "careless": (
        "Careless callers",
        "Requests cancelled, let go, raising, interrupted.",
    ),
    "drafter_cost": ("Drafting", "Microseconds of a draft, beside the bare passes in it."),
    "interrupts": ("Interrupts", "Ctrl-C at every line of a short run: what it broke."),
    "limits": ("Limits", "Passes and rounds against a bare read of the weights."),
    "overhead": ("Overhead", "What a round takes beyond drafting and verifying."),
    "quantise_error": ("Quantised weights", "What fewer bits do to the target's law."),
    "soak": ("Soak", "Thousands of requests, some cancelled: are memory and acceptance steady?"),
}
_UNKNOWN = "A benchmark that this report knows no figure for."


def fits(record: Record) -> bool:
    """Whether a file is of a benchmark of ours that no reader knows: it has cells, and says where
    they come from, and has no schema that another version would have changed."""
    return not record.get("schema") and "provenance" in record and "cells" in record


def part(source: Source) -> list[Part]:
    """Raises RecordError."""
    record = source.record
    title, about = TITLES.get(source.kind, (source.kind.replace("_", " "), _UNKNOWN))
    rows: list[Record] = objects_of(record, "cells") or [
        {"format": name, **object_of(object_of(record, "formats"), name)}
        for name in object_of(record, "formats")
    ]
    if not rows:
        raise RecordError("it has no cells")
    origins = [origin_of(record)]
    told = {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("quick", "foreign_cpu_share")
    }
    return [
        Part(
            kind="costs",
            title=title,
            place=source.place,
            about=[about],
            findings=[f"{name.replace('_', ' ')}: {shown(value)}" for name, value in told.items()],
            tables=[plain_table(title, rows)],
            warnings=doubts(record, [], origins),
            origins=origins,
        )
    ]
