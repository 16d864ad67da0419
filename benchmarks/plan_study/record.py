"""The file of a study: one JSON line for whatever became known, appended as soon as it did.

The first line is the draw: the seed, and every cell that it gave. Then come lines of kind "run",
for the circumstances and the calibration of what follows, and for each cell a "prediction" before
its "measured". A study that was stopped goes on in its file: half a line at the end is dropped, and
a cell that was measured is not measured again.

Then what the file says: how far predictions were off, by kind of cell, and what the chosen K cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plan_study.draw import Cell

from outrider.bench.pages import Section
from outrider.bench.predictions import (
    SCHEMA,
    Accuracy,
    Result,
    accuracy,
    by_kind,
    of_unseen,
    results_of,
)
from outrider.bench.store import RecordError, Store

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
KINDS = ("draw", "run", "prediction", "measured", "ladder")


@dataclass(slots=True)
class Study:
    """What the file at `path` says so far, line by line."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(
            self.path, SCHEMA, "draw", self._take, is_versioned=False, is_single_file=True
        )

    @classmethod
    def open(cls, path: Path) -> Study:
        """Raises ConfigError for a file that is none of ours, MachineError for one that cannot be
        used."""
        study = cls(path)
        study.store.open()
        return study

    def cells_drawn(self, cells: Sequence[Cell], facts: Mapping[str, object]) -> None:
        """Write the draw, or find that the file is of the same one. Raises ConfigError if not."""
        drawn = json.loads(json.dumps({"cells": [asdict(cell) for cell in cells], **facts}))
        if not self.lines:
            self.store.begin(drawn)
            self.lines.append(self.store.heads[0])
            return
        self.store.check(
            lambda head: None if drawn.items() <= head.items() else "a draw of other cells"
        )

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["record"] == kind]

    def by_cell(self, kind: str) -> dict[int, dict[str, Any]]:
        """The newest line of each cell."""
        return {line["cell"]: line for line in self.of_kind(kind)}

    def add(self, kind: str, values: Mapping[str, object]) -> None:
        """Append a line. Raises MachineError, also if somebody else wrote to the file."""
        self.store.add(kind, [values])
        self.lines.append(json.loads(json.dumps({"record": kind, **values})))

    def _take(self, kind: str, record: dict[str, Any]) -> None:
        if kind not in KINDS:
            raise RecordError(f"record is {kind!r:.40}")
        self.lines.append(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of one row of K: the one that the plan chose, the fastest, and the speed lost, as a share."""

    chosen: int
    best: int
    lost: float


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


def choice_of(predicted: Mapping[int, float], measured: Mapping[int, float]) -> Choice:
    """Speed-ups by K; K = 0 is plain decoding, with 1. Of equal predictions the smallest K."""
    chosen = max(predicted, key=lambda k: (predicted[k], -k))
    best = max(measured, key=lambda k: (measured[k], -k))
    return Choice(chosen=chosen, best=best, lost=1 - measured[chosen] / measured[best])
