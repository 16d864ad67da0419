"""A study in words and tables: how far predictions were off, by kind of cell, and choices of K."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.bench.pages import Section
from outrider.bench.plan_cells.record import Study
from outrider.bench.plan_cells.summary import (
    Accuracy,
    Choice,
    Result,
    accuracy,
    by_kind,
    choice_of,
    of_unseen,
    results_of,
)

# What a study must show.
MEDIAN, PERCENTILE_95, RIGHT_SIGNS, LOST = 0.05, 0.12, 0.95, 0.03

_KINDS: Mapping[str, Callable[[Result], str]] = {
    "drafter": lambda one: one.drafter,
    "stratum": lambda one: one.stratum,
    "K": lambda one: f"{_octave(one.k):3d} on",
    "batch": lambda one: f"{_octave(one.batch):3d} on",
    "context": lambda one: f"{_octave(one.context):4d} on",
}
_HEADER = ("cells", "number", "median %", "95th percentile %", "bias %", "right signs %")


def results_in(study: Study) -> list[Result]:
    drawn = study.of_kind("draw")
    cells = {cell["number"]: cell for line in drawn for cell in line["cells"]}
    return results_of(cells, study.by_cell("prediction"), study.by_cell("measured"))


def choices_in(study: Study) -> list[Choice]:
    """Of every row of K that was measured."""
    return [
        choice_of(_by_k(line["predicted"]), _by_k(line["measured"]))
        for line in study.by_cell("ladder").values()
    ]


def sections(study: Study) -> list[Section]:
    """Nothing before the first cell was measured."""
    results, choices = results_in(study), choices_in(study)
    if not results:
        return []
    found = accuracy(results)
    rows = [
        _row(f"{what} {name.strip()}", one)
        for what, kind in _KINDS.items()
        for name, one in by_kind(results, kind)
    ]
    table = Section(
        title="Predictions against measurements",
        text=_words(found, choices, results),
        header=_HEADER,
        rows=[_row("all", found), *(_row(*one) for one in of_unseen(results)), *rows],
    )
    return [table]


def record_of(study: Study) -> dict[str, Any]:
    """The figures that bars are set for, and whether each was met."""
    results, choices = results_in(study), choices_in(study)
    if not results:
        return {"cells": 0}
    found = accuracy(results)
    worst = max((choice.lost for choice in choices), default=None)
    return {
        "cells": found.count,
        "losing_share": found.losing / found.count,
        "median_error": found.median,
        "percentile_95_error": found.percentile_95,
        "bias": found.bias,
        "right_signs": found.right_signs,
        "sure_cells": found.sure,
        "right_of_sure": found.right_of_sure,
        "unseen": {name: asdict(one) for name, one in of_unseen(results)},
        "choices": len(choices),
        "worst_choice_lost": worst,
        "bars": {
            "median_error": found.median < MEDIAN,
            "percentile_95_error": found.percentile_95 < PERCENTILE_95,
            "right_signs": found.right_signs >= RIGHT_SIGNS,
            "worst_choice_lost": None if worst is None else worst <= LOST,
        },
    }


def _words(found: Accuracy, choices: Sequence[Choice], results: Sequence[Result]) -> list[str]:
    sure = (
        "no cell is sure"
        if found.right_of_sure is None
        else (f"{100 * found.right_of_sure:.0f} % of the {found.sure} whose interval leaves out 1")
    )
    told = [
        f"Speed-ups of {found.count} cells, {found.losing} of them losses, were foretold, their "
        f"rounds replayed, with a "
        f"median error of {100 * found.median:.1f} %, {100 * found.percentile_95:.1f} % at the "
        f"95th percentile and a bias of {100 * found.bias:+.1f} %.",
        *(
            f"Of texts like these, {name}, the median error is {100 * one.median:.1f} %, and "
            f"{100 * one.percentile_95:.1f} % at the 95th percentile."
            for name, one in of_unseen(results)
        ),
        f"The sign was right in {100 * found.right_signs:.0f} % of all cells, and in {sure}.",
    ]
    if choices:
        lost = sorted(choice.lost for choice in choices)
        told.append(
            f"The chosen K cost {100 * lost[len(lost) // 2]:.1f} % of the best K's speed in the "
            f"median of {len(lost)} rows of K, and {100 * lost[-1]:.1f} % at most."
        )
    wrong = [str(one.number) for one in results if one.same is False]
    if wrong:
        told.append(f"PROBLEM: other text than plain decoding in cells {', '.join(wrong)}.")
    return told


def _row(name: str, found: Accuracy) -> tuple[str, ...]:
    return (
        name,
        str(found.count),
        f"{100 * found.median:.1f}",
        f"{100 * found.percentile_95:.1f}",
        f"{100 * found.bias:+.1f}",
        f"{100 * found.right_signs:.0f}",
    )


def _octave(value: int) -> int:
    """The power of two below it."""
    return 1 << (value.bit_length() - 1)


def _by_k(speeds: Mapping[str, float]) -> dict[int, float]:
    return {int(k): speed for k, speed in speeds.items()}
