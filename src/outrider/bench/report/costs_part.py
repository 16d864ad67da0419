"""Parts of what passes and memory cost: verifying K drafts, and taking rejected ones back.

From the studies `verify_cost` and `memory_cost` of `benchmarks/pass_cost.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from outrider.bench.figure_panels import caption, label_ends
from outrider.bench.figure_style import Theme, new_figure
from outrider.bench.report.pieces import plain_table
from outrider.bench.report.reading import (
    Record,
    count_of,
    doubts,
    number_of,
    object_of,
    objects_of,
    origin_of,
    positive_of,
    text_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Figure, Part
from outrider.bench.store import RecordError

# Entries: rows of a pass, or tokens, with a value each.
Curve = Sequence[tuple[float, float]]


def verify(source: Source) -> list[Part]:
    """Time of a verifying pass by rows. Raises RecordError."""
    record = source.record
    cells = objects_of(record, "cells")
    if not cells:
        raise RecordError("it has no cells")
    curves: dict[int, list[tuple[float, float]]] = {}
    for cell in cells:
        context = count_of(cell, "context")
        curves.setdefault(context, []).append((count_of(cell, "rows"), positive_of(cell, "ms")))
    name = _model(record)
    relative = {
        f"{context:,} tokens of context": [(rows, ms / curve[0][1]) for rows, ms in curve]
        for context, curve in ((context, sorted(found)) for context, found in curves.items())
        if curve[0][0] == 1
    }
    found = [
        f"{words}: {int(rows)} rows take {ratio:.2f}× one row."
        for words, curve in relative.items()
        for rows, ratio in [curve[-1]]
    ]
    figure = Figure(
        name="verify_time_vs_rows",
        title=f"A verifying pass by its rows, {name}",
        alt=f"Time of a pass over that of one row, by rows, {name}, beside constant cost and cost "
        "by row. Numbers are in the table below.",
        draw=partial(by_rows, relative, name),
    )
    return [_part(source, f"Verifying passes: {name}", found, [figure] if relative else [], cells)]


def memory(source: Source) -> list[Part]:
    """Time of appending, by context, and of taking back, by rejected tokens. Raises RecordError."""
    record = source.record
    rollback, append = _curve(record, "rollback_us"), _curve(record, "append_us")
    if not rollback or not append:
        raise RecordError("it has no times")
    found = [
        f"Taking back {rollback[-1][0]:g} rejected tokens takes "
        f"{rollback[-1][1] / rollback[0][1]:.2f}× as long as {rollback[0][0]:g}.",
        f"Appending at {append[-1][0]:,.0f} tokens of context takes "
        f"{append[-1][1] / append[0][1]:.2f}× as long as at {append[0][0]:,.0f}.",
    ]
    figure = Figure(
        name="rollback_time",
        title="Taking rejected drafts back",
        alt="Microseconds by rejected tokens, and of an append by context, each beside a constant "
        "cost. Numbers are in the table below.",
        draw=partial(memory_times, rollback, append),
    )
    rows: list[Record] = [
        *({"what": "take back", "tokens": int(n), "microseconds": us} for n, us in rollback),
        *({"what": "append at", "tokens": int(n), "microseconds": us} for n, us in append),
    ]
    return [_part(source, "Memory: appending and taking back", found, [figure], rows)]


def by_rows(curves: Mapping[str, Curve], name: str, theme: Theme) -> Any:
    """T(R) / T(1), a line a context, on axes that double."""
    figure = new_figure(3.8, f"A verifying pass by its rows, {name}")
    axes = figure.subplots()
    ends: list[tuple[str, float, str]] = []
    longest = max(rows for curve in curves.values() for rows, _ in curve)
    tallest = max(ratio for curve in curves.values() for _, ratio in curve)
    for number, (words, curve) in enumerate(curves.items()):
        color = theme.hues[number % len(theme.hues)]
        axes.plot(*zip(*curve, strict=True), color=color, marker="os^Dvp"[number % 6])
        ends.append((words, curve[-1][1], color))
    axes.axhline(1, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(longest, 1, "constant", color=theme.muted, va="bottom", ha="right", fontsize=8)
    steps = np.linspace(1, longest, 200)
    axes.plot(steps, steps, color=theme.muted, linewidth=1.2, linestyle=":")
    axes.text(1.05 * tallest, tallest, "token by token", color=theme.muted, fontsize=8, va="top")
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(12) if 2**i <= longest]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(0.9, 2.2 * longest)
    axes.set_ylim(0, 1.12 * tallest)
    label_ends(axes, 1.08 * longest, ends, gap=0.07 * tallest)
    axes.set_xlabel("rows of a pass (K drafts and the pending token, of each sequence)")
    axes.set_ylabel("time of a pass / one row")
    caption(figure, name, theme)
    return figure


def memory_times(rollback: Curve, append: Curve, theme: Theme) -> Any:
    figure = new_figure(3.4, "What memory costs a round")
    panels = figure.subplots(1, 2)
    said = (("rejected tokens", rollback), ("tokens of context", append))
    for axes, (label, curve), title in zip(
        panels, said, ("Taking rejected drafts back", "Appending"), strict=True
    ):
        axes.set_title(title, loc="left")
        axes.plot(range(len(curve)), [us for _, us in curve], color=theme.hues[0], marker="o")
        level = curve[0][1]
        axes.axhline(level, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(0, 0.93 * level, "constant", color=theme.muted, fontsize=8, va="top")
        axes.set_xticks(range(len(curve)), [f"{x:,.0f}" for x, _ in curve])
        axes.set_ylim(0, 1.25 * max(us for _, us in curve))
        axes.set_xlabel(label)
    panels[0].set_ylabel("microseconds")
    caption(figure, "medians; dashed: as long as the first", theme)
    return figure


def _curve(record: Record, name: str) -> list[tuple[float, float]]:
    """Of an object whose names are numbers."""
    found = object_of(record, name)
    try:
        return sorted((float(key), positive_of(found, key)) for key in found)
    except ValueError as error:
        raise RecordError(f"{name}: {error}") from None


def _model(record: Record) -> str:
    size, bits = number_of(record, "num_parameters"), text_of(record, "quantise", "none")
    parts = [
        text_of(record, "target", "a target"),
        f"{size / 1e6:,.0f} M parameters" if size else "",
        "bfloat16" if bits == "none" else bits,
    ]
    return ", ".join(part for part in parts if part)


def _part(
    source: Source,
    title: str,
    found: Sequence[str],
    figures: Sequence[Figure],
    rows: Sequence[Record],
) -> Part:
    origins = [origin_of(source.record)]
    return Part(
        kind="costs",
        title=title,
        place=source.place,
        about=["Medians of passes timed by themselves, in turns."],
        findings=found,
        figures=figures,
        tables=[plain_table(title, rows)],
        warnings=doubts(source.record, [], origins),
        origins=origins,
    )
