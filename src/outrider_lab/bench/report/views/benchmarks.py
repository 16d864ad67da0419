"""The parts of our own benchmarks: what passes cost, and what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from outrider.core.files import FileKind, read_text
from outrider_lab.bench.charts import Axis, Chart, Line, Lines, Point
from outrider_lab.bench.predictions import (
    Accuracy,
    Result,
    accuracy,
    by_kind,
    of_unseen,
    results_of,
)
from outrider_lab.bench.report.parts import (
    Figure,
    Part,
    Record,
    Source,
    count_of,
    number_of,
    object_of,
    objects_of,
    origin_of,
    part_of,
    positive_of,
    text_of,
)
from outrider_lab.bench.report.plots import PredictedPair, curve, said, scatter_figure
from outrider_lab.measure.store import RecordError, Section, parse, plain_table, shown

# What each benchmark of studies/ without a figure measures, in a sentence.
TITLES: Mapping[str, tuple[str, str]] = {
    "accept_cost": ("Acceptance", "Microseconds of judging a draft, native against PyTorch."),
    "batch": ("Batches", "Plain decoding of several sequences at once."),
    "careless": ("Careless callers", "Requests cancelled, let go, raising, interrupted."),
    "drafter_cost": ("Drafting", "Microseconds of a draft, beside the bare passes in it."),
    "linear_rows": ("Linears", "One linear by its rows, formats and kinds of kernels."),
    "lookup_cost": ("Look-ups", "Microseconds of a round by the length of the text."),
    "interrupts": ("Interrupts", "Ctrl-C at every line of a short run: what it broke."),
    "limits": ("Limits", "Passes and rounds against a bare read of the weights."),
    "overhead": ("Overhead", "What a round takes beyond drafting and verifying."),
    "quantise_error": ("Quantised weights", "What fewer bits do to the target's distribution."),
    "soak": ("Soak", "Thousands of requests, some cancelled: are memory and acceptance steady?"),
}
_UNKNOWN = "A benchmark that this report knows no figure for."
_KINDS: Mapping[str, Callable[[Result], str]] = {
    "drafter": lambda one: one.drafter,
    "batch": lambda one: f"{one.batch:2d}",
    "stratum": lambda one: one.stratum,
}
_ERRORS_NOTE = (
    "An error is predicted over measured speed-up, less 1; bias is the median with sign. "
    "Predictions are of the very texts, whose rounds are replayed; by distribution and by places "
    "are of texts like them, the former as a plan reckons."
)


def fits_plain(record: Record) -> bool:
    """Whether a file is of a benchmark of ours that no reader knows: it has cells, and says where
    they come from, and has no schema that another version would have changed."""
    return not record.get("schema") and "provenance" in record and "cells" in record


def plain(source: Source) -> list[Part]:
    """Of a benchmark whose results are a table: a row a cell. Raises RecordError."""
    record = source.record
    title, about = TITLES.get(source.kind, (source.kind.replace("_", " "), _UNKNOWN))
    rows: list[Record] = objects_of(record, "cells") or [
        {"format": name, **object_of(object_of(record, "formats"), name)}
        for name in object_of(record, "formats")
    ]
    figures = {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("quick", "foreign_cpu_share")
    }
    return [
        part_of(
            source,
            kind="costs",
            title=title,
            about=[about],
            findings=[
                f"{name.replace('_', ' ')}: {shown(value)}" for name, value in figures.items()
            ],
            tables=[plain_table(title, _some(rows))],
        )
    ]


def verify(source: Source) -> list[Part]:
    """Time of a verifying pass by rows. Raises RecordError."""
    record = source.record
    cells = _some(objects_of(record, "cells"))
    curves: dict[str, list[Point]] = {}
    for cell in cells:
        place = (count_of(cell, "rows"), positive_of(cell, "ms"))
        curves.setdefault(f"{count_of(cell, 'context'):,} tokens of context", []).append(place)
    size, bits = number_of(record, "num_parameters"), text_of(record, "quantise", "none")
    target, form = text_of(record, "target", "a target"), "bfloat16" if bits == "none" else bits
    words = [target, f"{size / 1e6:,.0f} M parameters" if size else "", form]
    name = ", ".join(word for word in words if word)
    title = f"A verifying pass by its rows, {name}"
    label = "rows of a pass (K drafts and the pending token, of each sequence)"
    figure = _growth("verify_time_vs_rows", title, label, curves, by_row=True)
    return [_costs(source, f"Verifying passes: {name}", [figure], cells)]


def memory(source: Source) -> list[Part]:
    """Time of appending, by context, and of taking back, by rejected tokens. Raises RecordError."""
    times = {
        label: _times(source.record, name)
        for label, name in (("rejected tokens", "rollback_us"), ("tokens of context", "append_us"))
    }
    titles = ("Taking rejected drafts back", "Appending")
    names = ("rollback_time", "append_time")
    figures = [
        _growth(name, title, label, {"": found})
        for name, title, (label, found) in zip(names, titles, times.items(), strict=True)
    ]
    rows: list[Record] = [
        {"by": label, "tokens": int(num), "microseconds": us}
        for label, found in times.items()
        for num, us in found
    ]
    return [_costs(source, "Memory: appending and taking back", figures, rows)]


def _times(record: Record, name: str) -> list[Point]:
    """Of an object whose names are numbers."""
    found = object_of(record, name)
    if not found:
        raise RecordError("it has no times")
    try:
        return sorted((float(key), positive_of(found, key)) for key in found)
    except ValueError as error:
        raise RecordError(f"{name}: {error}") from None


def _growth(
    name: str,
    title: str,
    label: str,
    curves: Mapping[str, Sequence[Point]],
    *,
    by_row: bool = False,
) -> Figure:
    """Times over the least point's, a line a curve, beside a constant and a cost `by_row`."""
    places = sorted({place for found in curves.values() for place, _ in found})
    lines = [
        curve(words, [(places.index(x), y / min(found)[1]) for x, y in sorted(found)], number)
        for number, (words, found) in enumerate(curves.items())
    ]
    tallest = max(y for line in lines for _, y in line.points)
    if by_row:
        points = [(i, place / places[0]) for i, place in enumerate(places) if place]
        lines.append(Line(name="token by token", points=points, color="muted", dash=":", width=1.2))
    panel = Lines(
        lines=lines,
        levels=[("constant", 1)],
        x=Axis(label=label, ticks=[f"{place:,.0f}" for place in places]),
        y=Axis(label="time / that of the first", low=0, high=1.15 * tallest),
    )
    words = (
        f"{title}: times over that of the first, beside a constant cost. Numbers are in the table."
    )
    return Figure(
        name=name, chart=Chart(title=title, panels=[[panel]], foot="medians"), words=words
    )


def _costs(source: Source, title: str, figures: Sequence[Figure], rows: Sequence[Record]) -> Part:
    return part_of(
        source,
        kind="costs",
        title=title,
        about=["Medians of passes timed by themselves, in turns."],
        figures=figures,
        tables=[plain_table(title, rows)],
    )


def rounds(source: Source) -> list[Part]:
    """Of the study `predicted`: rounds against the parts they are made of. Raises RecordError."""
    cells = _some(objects_of(source.record, "cells"))
    pairs = [
        PredictedPair(
            series=f"tier {text_of(cell, 'tier', '?').upper()}, {text_of(cell, 'drafter', '?')}",
            predicted=positive_of(cell, "predicted_tokens_per_second"),
            measured=positive_of(cell, "achieved_tokens_per_second"),
        )
        for cell in cells
    ]
    figure = scatter_figure(
        "predicted_rounds",
        pairs,
        "Rounds as they ran against their parts, timed before",
        "tokens a second",
        foot="the band is ±25 %",
    )
    return [
        part_of(
            source,
            kind="prediction",
            title="Rounds against their parts",
            about=["Tokens a second that the times of drafting and verifying add up to."],
            findings=said(pairs, "tokens a second"),
            figures=[figure],
            tables=[plain_table("Rounds against their parts", cells)],
        )
    ]


def plan(source: Source) -> list[Part]:
    """Of studies/plan_cells.py: what the planner promised and what was measured. Its cells are
    drawn so that many lose, so they make no claims. Raises RecordError."""
    # A line that was cut off at the end is left out.
    lines = [parse(line) for line in read_text(source.path, FileKind.RESULTS).split("\n")[:-1]]
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
        PredictedPair(
            series=one.drafter,
            predicted=one.predicted,
            measured=one.measured,
            low=one.low,
            high=one.high,
        )
        for one in results
    ]
    figure = scatter_figure(
        "planned_and_measured",
        pairs,
        "Speed-ups as planned and as measured",
        "times plain decoding",
        foot="bars are 95 % intervals; the band is ±25 %",
        plain=True,
    )
    rows = [{**asdict(one), "error": one.error} for one in results]
    differing = sum(one.same is False for one in results)
    text = f"In {differing} cells the text was not that of plain decoding."
    return [
        part_of(
            source,
            kind="prediction",
            title="The planner's promises",
            about=[
                f"{len(results)} of {len(cells)} drawn cells were predicted, then measured; in "
                f"{found.losing} of them speculation was slower."
            ],
            findings=[*said(pairs, "speed-ups"), *_signs(found)],
            figures=[figure],
            tables=[_accuracies(results), plain_table("Cells", rows)],
            warnings=[text] if differing else [],
            origins=[origin_of(line) for line in lines if line.get("record") == "run"],
        )
    ]


def _signs(found: Accuracy) -> list[str]:
    sure = found.right_of_sure
    certain = "" if sure is None else f", and in {100 * sure:.0f} % of {found.sure} that are sure"
    return [
        f"Whether speculation gains was foreseen in {100 * found.right_signs:.0f} % of the cells"
        f"{certain}.",
        f"The median of signed errors is {100 * found.bias:+.1f} %.",
    ]


def _accuracies(results: Sequence[Result]) -> Section:
    kinds = [
        *(("all,", name, one) for name, one in of_unseen(results)),
        *((what, *one) for what, kind in _KINDS.items() for one in by_kind(results, kind)),
    ]
    return Section(
        title="Errors by kind of cell",
        text=[_ERRORS_NOTE],
        header=("cells", "number", "median %", "percentile 95 %", "bias %", "right signs %"),
        rows=[
            (
                f"{what} {name}",
                str(one.count),
                f"{100 * one.median:.1f}",
                f"{100 * one.percentile_95:.1f}",
                f"{100 * one.bias:+.1f}",
                f"{100 * one.right_signs:.0f}",
            )
            for what, name, one in kinds
        ],
    )


def _some(cells: list[Record]) -> list[Record]:
    """Raises RecordError if there are none."""
    if not cells:
        raise RecordError("it has no cells")
    return cells
