"""Parts that set what was predicted beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from outrider.bench.predictions import (
    Accuracy,
    Result,
    accuracy,
    by_kind,
    of_unseen,
    results_of,
)
from outrider.bench.report.figure_scatter import Pair, scatter_figure
from outrider.bench.report.pieces import plain_table
from outrider.bench.report.reading import (
    Record,
    count_of,
    doubts,
    objects_of,
    origin_of,
    positive_of,
    text_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Part, Table
from outrider.bench.store import RecordError, parse
from outrider.core.files import Kind, read_text

_KINDS: Mapping[str, Callable[[Result], str]] = {
    "drafter": lambda one: one.drafter,
    "batch": lambda one: f"{one.batch:2d}",
    "stratum": lambda one: one.stratum,
}


def rounds(source: Source) -> list[Part]:
    """Of the study `predicted`: rounds against the parts they are made of. Raises RecordError."""
    record = source.record
    cells = objects_of(record, "cells")
    if not cells:
        raise RecordError("it has no cells")
    pairs = [
        Pair(
            series=f"tier {text_of(cell, 'tier', '?').upper()}, {text_of(cell, 'drafter', '?')}",
            predicted=positive_of(cell, "predicted_tokens_per_second"),
            measured=positive_of(cell, "achieved_tokens_per_second"),
        )
        for cell in cells
    ]
    words = {
        "title": "Rounds as they ran against their parts, timed before",
        "axis": "tokens a second",
        "foot": "the band is ±25 %",
    }
    origins = [origin_of(record)]
    return [
        Part(
            kind="prediction",
            title="Rounds against their parts",
            place=source.place,
            about=["Tokens a second that the times of drafting and verifying add up to."],
            findings=said(pairs, "tokens a second"),
            figures=[scatter_figure("predicted_rounds", pairs, words)],
            tables=[plain_table("Rounds against their parts", cells)],
            warnings=doubts(record, [], origins),
            origins=origins,
        )
    ]


def plan(source: Source) -> list[Part]:
    """Of benchmarks/plan_cells.py: what the planner promised and what was measured. Its cells are
    drawn so that many lose, so they make no claims. Raises RecordError."""
    lines = _lines(source)
    cells = {count_of(cell, "number"): cell for cell in objects_of(source.record, "cells")}
    newest = {
        kind: {count_of(line, "cell"): line for line in lines if line.get("record") == kind}
        for kind in ("prediction", "measured")
    }
    results = results_of(cells, newest["prediction"], newest["measured"])
    if not results:
        raise RecordError("no cell has been predicted and measured yet")
    found = accuracy(results)
    pairs = [
        Pair(
            series=one.drafter,
            predicted=one.predicted,
            measured=one.measured,
            low=one.low,
            high=one.high,
        )
        for one in results
    ]
    words = {
        "title": "Speed-ups as planned and as measured",
        "axis": "times plain decoding",
        "baseline": "plain decoding",
        "foot": "bars are 95 % intervals; the band is ±25 %",
    }
    origins = [origin_of(line) for line in lines if line.get("record") == "run"]
    differing = sum(one.same is False for one in results)
    return [
        Part(
            kind="prediction",
            title="The planner's promises",
            place=source.place,
            about=[
                f"{len(results)} of {len(cells)} drawn cells were predicted, then measured; in "
                f"{found.losing} of them speculation was slower."
            ],
            findings=[*said(pairs, "speed-ups"), *_signs(found)],
            figures=[scatter_figure("planned_and_measured", pairs, words)],
            tables=[
                _accuracies(results),
                plain_table("Cells", [{**asdict(one), "error": one.error} for one in results]),
            ],
            warnings=[
                *(
                    [f"In {differing} cells the text was not that of plain decoding."]
                    * bool(differing)
                ),
                *doubts(source.record, [], origins),
            ],
            origins=origins,
        )
    ]


def _lines(source: Source) -> list[Record]:
    """All whole lines; one that was cut off at the end is left out."""
    lines = read_text(source.path, Kind.RESULTS).split("\n")[:-1]
    return [parse(line) for line in lines]


def _signs(found: Accuracy) -> list[str]:
    sure = found.right_of_sure
    told = "" if sure is None else f", and in {100 * sure:.0f} % of {found.sure} that are sure"
    return [
        f"Whether speculation gains was foreseen in {100 * found.right_signs:.0f} % of the cells"
        f"{told}.",
        f"The median of signed errors is {100 * found.bias:+.1f} %.",
    ]


def _accuracies(results: Sequence[Result]) -> Table:
    rows = [
        (
            f"{what} {name}",
            str(one.count),
            f"{100 * one.median:.1f}",
            f"{100 * one.percentile_95:.1f}",
            f"{100 * one.bias:+.1f}",
            f"{100 * one.right_signs:.0f}",
        )
        for what, name, one in (
            *(("all,", name, one) for name, one in of_unseen(results)),
            *((what, *one) for what, kind in _KINDS.items() for one in by_kind(results, kind)),
        )
    ]
    return Table(
        title="Errors by kind of cell",
        header=("cells", "number", "median %", "percentile 95 %", "bias %", "right signs %"),
        rows=rows,
        note="An error is predicted over measured speed-up, less 1; bias is the median with sign. "
        "Predictions are of the very texts, whose rounds are replayed; by law and by places are of "
        "texts like them, the former as a plan reckons.",
    )


def said(pairs: Sequence[Pair], what: str) -> list[str]:
    """How far predictions were off."""
    errors = sorted(abs(pair.error) for pair in pairs)
    worst = max(pairs, key=lambda pair: abs(pair.error))
    place = min(len(errors) - 1, round(0.95 * (len(errors) - 1)))
    return [
        f"Predicted {what} are off by {100 * statistics.median(errors):.1f} % in the median of "
        f"{len(pairs)} cells and by {100 * errors[place]:.1f} % at percentile 95.",
        f"The largest miss is {100 * worst.error:+.0f} %, at {worst.series}.",
    ]
