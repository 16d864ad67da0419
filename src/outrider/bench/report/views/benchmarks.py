"""The parts of our own benchmarks: what passes cost, and what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from outrider.bench.charts import Axis, Chart, Line, Lines, Point
from outrider.bench.pages import Section
from outrider.bench.predictions import (
    Accuracy,
    Result,
    accuracy,
    by_kind,
    of_unseen,
    results_of,
)
from outrider.bench.report.parts import Figure, Part, Record, Source
from outrider.bench.report.plots import Pair, curve, said, scatter_figure
from outrider.bench.report.reading import (
    count_of,
    number_of,
    object_of,
    objects_of,
    origin_of,
    part_of,
    plain_table,
    positive_of,
    shown,
    text_of,
)
from outrider.bench.store import RecordError, parse
from outrider.core.files import FileKind, read_text

# What each benchmark of benchmarks/ without a figure measures, in a sentence.
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
_KINDS: Mapping[str, Callable[[Result], str]] = {
    "drafter": lambda one: one.drafter,
    "batch": lambda one: f"{one.batch:2d}",
    "stratum": lambda one: one.stratum,
}
_ERRORS_NOTE = (
    "An error is predicted over measured speed-up, less 1; bias is the median with sign. "
    "Predictions are of the very texts, whose rounds are replayed; by law and by places are of "
    "texts like them, the former as a plan reckons."
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
    told = {
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
            findings=[f"{name.replace('_', ' ')}: {shown(value)}" for name, value in told.items()],
            tables=[plain_table(title, _some(rows))],
        )
    ]


def verify(source: Source) -> list[Part]:
    """Time of a verifying pass by rows. Raises RecordError."""
    record = source.record
    cells = _some(objects_of(record, "cells"))
    curves: dict[int, list[Point]] = {}
    for cell in cells:
        place = (count_of(cell, "rows"), positive_of(cell, "ms"))
        curves.setdefault(count_of(cell, "context"), []).append(place)
    relative = {
        f"{context:,} tokens of context": [(rows, ms / found[0][1]) for rows, ms in found]
        for context, found in ((context, sorted(found)) for context, found in curves.items())
        if found[0][0] == 1
    }
    size, bits = number_of(record, "num_parameters"), text_of(record, "quantise", "none")
    target, form = text_of(record, "target", "a target"), "bfloat16" if bits == "none" else bits
    words = [target, f"{size / 1e6:,.0f} M parameters" if size else "", form]
    name = ", ".join(word for word in words if word)
    figure = Figure(
        name="verify_time_vs_rows",
        chart=_by_rows(relative, name),
        words=f"Time of a pass over that of one row, by rows, {name}, beside constant cost and "
        "cost by row. Numbers are in the table below.",
    )
    findings = [
        f"{words}: {int(found[-1][0])} rows take {found[-1][1]:.2f}× one row."
        for words, found in relative.items()
    ]
    return [_costs(source, f"Verifying passes: {name}", findings, [figure] * bool(relative), cells)]


def _by_rows(curves: Mapping[str, Sequence[Point]], name: str) -> Chart:
    """T(R) / T(1), a line a context, on an axis that doubles."""
    points = [point for found in curves.values() for point in found]
    longest = max((rows for rows, _ in points), default=1)
    tallest = max((ratio for _, ratio in points), default=1)
    steps = [1 + i * (longest - 1) / 200 for i in range(201)]
    lines = [
        *(curve(words, found, number) for number, (words, found) in enumerate(curves.items())),
        Line(
            name="token by token",
            points=[(step, step) for step in steps],
            color="muted",
            dash=":",
            width=1.2,
        ),
    ]
    panel = Lines(
        lines=lines,
        levels=[("constant", 1)],
        x=Axis(
            label="rows of a pass (K drafts and the pending token, of each sequence)",
            ticks={float(2**i): str(2**i) for i in range(12) if 2**i <= longest},
            low=0.9,
            high=1.15 * longest,
            scale="log",
        ),
        y=Axis(label="time of a pass / one row", low=0, high=1.12 * tallest),
    )
    return Chart(title=f"A verifying pass by its rows, {name}", panels=[[panel]], foot=name)


def memory(source: Source) -> list[Part]:
    """Time of appending, by context, and of taking back, by rejected tokens. Raises RecordError."""
    rollback, append = (_times(source.record, name) for name in ("rollback_us", "append_us"))
    panels = [
        Lines(
            title=title,
            lines=[curve("", [(i, us) for i, (_, us) in enumerate(found)], 0)],
            levels=[("as long as the first", found[0][1])],
            x=Axis(label=label, ticks=[f"{x:,.0f}" for x, _ in found]),
            y=Axis(label=unit, low=0, high=1.25 * max(us for _, us in found)),
        )
        for title, label, unit, found in (
            ("Taking rejected drafts back", "rejected tokens", "microseconds", rollback),
            ("Appending", "tokens of context", "", append),
        )
    ]
    chart = Chart(title="What memory costs a round", panels=[panels], foot="medians", height=3.4)
    figure = Figure(
        name="rollback_time",
        chart=chart,
        words="Microseconds by rejected tokens, and of an append by context, each beside a "
        "constant cost. Numbers are in the table below.",
    )
    findings = [
        f"Taking back {rollback[-1][0]:g} rejected tokens takes "
        f"{rollback[-1][1] / rollback[0][1]:.2f}× as long as {rollback[0][0]:g}.",
        f"Appending at {append[-1][0]:,.0f} tokens of context takes "
        f"{append[-1][1] / append[0][1]:.2f}× as long as at {append[0][0]:,.0f}.",
    ]
    rows: list[Record] = [
        *({"what": "take back", "tokens": int(n), "microseconds": us} for n, us in rollback),
        *({"what": "append at", "tokens": int(n), "microseconds": us} for n, us in append),
    ]
    return [_costs(source, "Memory: appending and taking back", findings, [figure], rows)]


def _times(record: Record, name: str) -> list[Point]:
    """Of an object whose names are numbers."""
    found = object_of(record, name)
    if not found:
        raise RecordError("it has no times")
    try:
        return sorted((float(key), positive_of(found, key)) for key in found)
    except ValueError as error:
        raise RecordError(f"{name}: {error}") from None


def _costs(
    source: Source,
    title: str,
    findings: Sequence[str],
    figures: Sequence[Figure],
    rows: Sequence[Record],
) -> Part:
    return part_of(
        source,
        kind="costs",
        title=title,
        about=["Medians of passes timed by themselves, in turns."],
        findings=findings,
        figures=figures,
        tables=[plain_table(title, rows)],
    )


def rounds(source: Source) -> list[Part]:
    """Of the study `predicted`: rounds against the parts they are made of. Raises RecordError."""
    cells = _some(objects_of(source.record, "cells"))
    pairs = [
        Pair(
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
    """Of benchmarks/plan_cells.py: what the planner promised and what was measured. Its cells are
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
        Pair(
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
    told = "" if sure is None else f", and in {100 * sure:.0f} % of {found.sure} that are sure"
    return [
        f"Whether speculation gains was foreseen in {100 * found.right_signs:.0f} % of the cells"
        f"{told}.",
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
