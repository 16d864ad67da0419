"""The file of a study: one JSON line for whatever became known, appended as soon as it did.

The first line is the draw: the seed, and every cell that it gave. Then come lines of kind "run",
for the circumstances and the calibration of what follows, and for each cell a "prediction" before
its "measured". A study that was stopped goes on in its file: half a line at the end is dropped, and
a cell that was measured is not measured again.

Then what the file says: how far predictions were off, and what the chosen K cost. `outrider report`
draws it, by kind of cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plan_study.draw import Cell

from outrider_lab.bench.predictions import SCHEMA, Result, accuracy, of_unseen, results_of
from outrider_lab.measure.store import RecordError, Store

# What a study must show.
MEDIAN, PERCENTILE_95, RIGHT_SIGNS, LOST = 0.05, 0.12, 0.95, 0.03

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


def _by_k(speeds: Mapping[str, float]) -> dict[int, float]:
    return {int(k): speed for k, speed in speeds.items()}


def choice_of(predicted: Mapping[int, float], measured: Mapping[int, float]) -> Choice:
    """Speed-ups by K; K = 0 is plain decoding, with 1. Of equal predictions the smallest K."""
    chosen = max(predicted, key=lambda k: (predicted[k], -k))
    best = max(measured, key=lambda k: (measured[k], -k))
    return Choice(chosen=chosen, best=best, lost=1 - measured[chosen] / measured[best])
